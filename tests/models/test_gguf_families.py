"""GGUF files of families whose config or tensors llama.cpp changes: Gemma 2 to 4, Phi-3 and gpt-oss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo
from gguf import GGMLQuantizationType as Type
from gguf_tools import write_gguf
from safetensors.torch import load_file

from h2o_flexgen import UserError
from h2o_flexgen.models.gguf import GGUFFile
from h2o_flexgen.models.registry import family, read_spec, spec_of

YARN = dict(rope_type="yarn", rope_theta=1.5e5, factor=8.0, original_max_position_embeddings=32, truncate=False)
#: variant -> architecture, and changes to its config without which a file says something else
FILES = {
    "gemma2": ("gemma2", dict(query_pre_attn_scalar=8)),
    "gemma3_text": ("gemma3", dict(query_pre_attn_scalar=8)),
    "gemma3_text_groups_of_3_linear_untied": ("gemma3", dict(query_pre_attn_scalar=10, final_logit_softcapping=None)),
    "gemma4_text": ("gemma4", dict(global_head_dim=16)),
    "gemma4_text_experts_and_values_that_are_keys": ("gemma4", dict(global_head_dim=16)),
    "phi3": ("phi3", {}),
    "phi3_groups_of_3_partial_tied_window": ("phi3", {}),
    "phi3_groups_of_8_longrope": ("phi3", dict(hidden_act="silu")),
    "gpt_oss": ("gpt-oss", dict(rope_parameters=YARN)),
}
#: those without experts, which have other names where they are stacked
DENSE = [name for name in FILES if name != "gpt_oss" and "experts" not in name]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """checkpoint(name) -> the tiny model of FILES, made once."""
    made = {}

    def get(name: str) -> zoo.Tiny:
        if name not in made:
            made[name] = zoo.build(name, tmp_path_factory.mktemp(name), **FILES[name][1])
        return made[name]

    return get


@pytest.mark.parametrize("name", FILES)
def test_the_config_is_that_of_the_checkpoint(tmp_path, checkpoint, name):
    tiny = checkpoint(name)
    found = spec_of(GGUFFile(write_gguf(tmp_path / "model.gguf", tiny, arch=FILES[name][0])).config)
    wanted = read_spec(tiny.folder)
    for layer in range(wanted.layers):
        ours = found.at(layer)
        theirs = wanted.at(layer)
        # a file holds floats of 32 bits
        assert ours.eps == pytest.approx(theirs.eps)
        assert (ours.rope.theta, dict(ours.rope.scaling).keys()) == (
            theirs.rope.theta,
            dict(theirs.rope.scaling).keys(),
        )
        for (key, value), (_, expected) in zip(ours.rope.scaling, theirs.rope.scaling):
            assert value == pytest.approx(expected), key
        alike = dict(eps=0.0, kinds=(), pattern=())
        assert replace(ours, **alike, rope=replace(ours.rope, scaling=())) == replace(
            theirs, **alike, rope=replace(theirs.rope, scaling=())
        )


@pytest.mark.parametrize("name", DENSE)
def test_the_tensors_are_those_of_the_checkpoint(tmp_path, checkpoint, name):
    tiny = checkpoint(name)
    file = GGUFFile(write_gguf(tmp_path / "model.gguf", tiny, arch=FILES[name][0]))
    spec = spec_of(file.config)
    state = load_file(tiny.folder / "model.safetensors")
    found = dict(file.checkpoint_tensors(family(spec.model_type).tensors(spec), torch.float32))
    assert found.keys() == state.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, state[key], rtol=0, atol=1e-6 if "norm" in key else 0)


@pytest.mark.parametrize("name", FILES)
def test_the_tokens_are_those_of_the_checkpoint(tmp_path, checkpoint, run, name):
    tiny = checkpoint(name)
    prompts = tiny.clear_cut_prompts([9, 12, 5], 6)
    path = write_gguf(tmp_path / "model.gguf", tiny, arch=FILES[name][0])
    outputs = run(zoo.Tiny(name, tiny.hf, path), prompts, 6, gpu_batch_size=2, num_gpu_batches=2)
    assert [o.token_ids for o in outputs] == [t.tokens for t in tiny.references(prompts, 6)]


def config(tmp_path, tiny, arch, **metadata) -> dict:
    return GGUFFile(write_gguf(tmp_path / "model.gguf", tiny, Type.F16, arch, **metadata)).config


def test_old_files_lack_keys(tmp_path, checkpoint):
    """llama.cpp's defaults stand for them."""
    found = config(tmp_path, checkpoint("phi3"), "phi3", phi3__context_length=4096)
    assert found["sliding_window"] is None
    path = write_gguf(tmp_path / "old.gguf", checkpoint("phi3"), arch="phi3", phi3__context_length=4096)
    path.write_bytes(path.read_bytes().replace(b"phi3.attention.sliding_window", b"phi3.attention.sliding_widnow"))
    assert GGUFFile(path).config["sliding_window"] == 2047
    path = write_gguf(tmp_path / "old.gguf", checkpoint("gemma3_text"), arch="gemma3")
    path.write_bytes(path.read_bytes().replace(b"gemma3.attention.sliding_window_pattern", b"g" * 39))
    assert GGUFFile(path).config["sliding_window_pattern"] == 6


@pytest.mark.parametrize("layers, largest", [(46, "gemma2"), (62, "gemma3")])
def test_the_largest_gemma_scales_attention_by_its_hidden_width(tmp_path, layers, largest):
    name = {"gemma2": "gemma2", "gemma3": "gemma3_text"}[largest]
    tiny = zoo.build(name, tmp_path / "checkpoint", num_hidden_layers=layers, hidden_size=32)
    assert config(tmp_path, tiny, largest)["query_pre_attn_scalar"] == 32 // 4


@pytest.mark.parametrize(
    "name, metadata, message",
    [
        ("gemma3_text", {"gemma3__attention__sliding_window": "wide"}, "sliding_window must be a whole number"),
        ("gemma3_text", {"gemma3__attention__sliding_window_pattern": [True]}, "layer_types must be a list of 3 times"),
        ("gemma3_text", {"gemma3__rope__dimension_count": 4}, "rotates only a part of each head"),
        ("gemma4_text", {"gemma4__attention__sliding_window_pattern": [True]}, "pattern has 1 values for 3 layers"),
        ("gemma4_text", {"gemma4__attention__head_count_kv": [2, 2]}, "head_count_kv has 2 values for 3 layers"),
        ("gemma4_text", {"gemma4__attention__head_count_kv": 3}, "4 is not divisible by num_key_value_heads 3"),
        ("gemma4_text", {"gemma4__embedding_length_per_layer_input": 8}, "embeddings for each layer"),
        ("gemma4_text", {"gemma4__attention__shared_kv_layers": 1}, "layers that share keys and values"),
        ("gemma4_text", {"gemma4__rope__dimension_count": 4}, "rotates only a part of each head"),
        ("gemma2", {"gemma2__attn_logit_softcapping": -1.0}, "attn_logit_softcapping must be a positive number"),
        ("phi3", {"phi3__rope__dimension_count": 3}, "RoPE cannot rotate 3 of 8"),
        ("phi3", {"phi3__rope__dimension_count": 0}, "rope.dimension_count must be a whole number"),
    ],
)
def test_invalid_metadata(tmp_path, checkpoint, name, metadata, message):
    with pytest.raises(UserError, match=message):
        config(tmp_path, checkpoint(name), FILES[name][0], **metadata)
