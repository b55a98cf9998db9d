"""Weights in 8 and 4 bits: the engine gives the tokens of the same values in fp32, wherever the weights are."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
import zoo
from gguf_tools import apart
from int8_oracle import in_blocks
from safetensors.torch import load_file, save_file

from h2o_flexgen import LLM, Policy, SamplingParams
from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import Int4, Int8, Quantised
from h2o_flexgen.formats.forms import names_of
from h2o_flexgen.models.registry import family, read_spec

#: widths divisible by groups of 32
WIDE = dict(hidden_size=64, num_attention_heads=4)
SIZES = {
    "opt": WIDE | dict(word_embed_proj_dim=64, ffn_dim=96),
    "gpt_neox": WIDE | dict(intermediate_size=96),
    "qwen3": WIDE | dict(intermediate_size=96, head_dim=16),
    "qwen3_moe": WIDE | dict(intermediate_size=96, moe_intermediate_size=32, head_dim=16),
    "qwen2_moe": WIDE
    | dict(intermediate_size=96, moe_intermediate_size=32, shared_expert_intermediate_size=64, head_dim=16),
    "gemma4_text": WIDE | dict(intermediate_size=96, head_dim=16, global_head_dim=24, num_attention_heads=8),
    "mistral": WIDE | dict(intermediate_size=96, head_dim=16),
}
PLACES = {
    "gpu": (100, 0, 100, 0, 100, 0),
    "cpu": (0, 100, 0, 100, 0, 100),
    "disk": (0, 0, 0, 0, 0, 0),
    "mixed": (30, 30, 40, 20, 50, 0),
}


def quantised(tiny: zoo.Tiny, kind: str, folder) -> zoo.Tiny:
    """The model in fp32 with the values that compressed weights stand for; "blocks" is int4 as matmuls in int8 round it
    where they read blocks directly."""
    spec, state = read_spec(tiny.folder), load_file(tiny.folder / "model.safetensors")
    matrices = apart(state)
    layers = family(spec.model_type).tensors(spec)
    ends = {*layers[0].shapes, *layers[-1].shapes}
    names = [name for layer in layers for name in layer.compressible]
    for name in [one for each in names for one in names_of(each) or [each]]:
        stored = next(n for n in (name, *(name.partition(".")[2],)) if n in matrices)
        w = matrices[stored]
        if w.dim() == 2:
            form = Int8() if kind == "int8" or name in ends else Int4(64 if w.shape[1] % 64 == 0 else 32)
            raw = torch.empty(form.nbytes(tuple(w.shape)), dtype=torch.uint8)
            form.encode(w.contiguous(), raw)
            matrix = Quantised(form, raw, tuple(w.shape))
            w.copy_(in_blocks(matrix) if kind == "blocks" and form != Int8() else matrix.to(w.dtype))
    shutil.copytree(tiny.folder, folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    from transformers import AutoModelForCausalLM

    return zoo.Tiny(tiny.name, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """models(name, kind) -> a tiny model, and the model with the values that its compressed weights stand for."""
    made, root = {}, tmp_path_factory.mktemp("compressed")

    def get(name: str, kind: str) -> tuple[zoo.Tiny, zoo.Tiny]:
        if name not in made:
            default = WIDE | dict(intermediate_size=96)
            made[name] = zoo.build(name, root / name, **SIZES.get(zoo.FAMILY[name], default))
        if (name, kind) not in made:
            made[name, kind] = quantised(made[name], kind, root / f"{name}_{kind}")
        return made[name], made[name, kind]

    return get


def generate(
    folder, prompts, kind=None, budget=None, dtype="float32", max_tokens=8, cache=None, **policy
) -> list[list[int]]:
    params, budget = SamplingParams(max_tokens=max_tokens, ignore_eos=True), budget and zoo.sized(*budget)
    options = dict(device="cpu", dtype=dtype, compress_weight=kind, compress_cache=cache, progress=False)
    with LLM(str(folder), Policy(**policy), budget, **options) as llm:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


@pytest.mark.parametrize("n, name", [*enumerate([*zoo.FIRST.values(), "350m_style"])])
def test_every_family_gives_the_tokens_of_the_quantised_values(models, n, name):
    """Also OPT with projections around its blocks."""
    kind = ("int8", "int4")[n % 2]
    tiny, oracle = models(name, kind)
    prompts = oracle.clear_cut_prompts([9, 4], 8)
    expected = [t.tokens for t in oracle.references(prompts, 8)]
    assert generate(tiny.folder, prompts, kind, gpu_batch_size=2, percent=PLACES["disk"]) == expected


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("n, place", [*enumerate(PLACES)], ids=PLACES)
def test_the_tokens_do_not_depend_on_the_placement(models, n, place, kind):
    tiny, oracle = models("llama_no_groups_tied", kind)
    budget = ((None, None), (3, 3))[n % 2]
    prompts = oracle.clear_cut_prompts([9, 4, 12], 8, [budget])
    expected = [t.tokens for t in oracle.references(prompts, 8, *budget)]
    options = dict(gpu_batch_size=2, num_gpu_batches=2, percent=PLACES[place], overlap=n < 2)
    assert generate(tiny.folder, prompts, kind, budget[0] and budget, **options) == expected


@pytest.mark.parametrize("kind, dtype", [("int8", "bfloat16"), ("int4", "float16")])
def test_in_16_bits_the_placement_does_not_matter_either(models, kind, dtype):
    tiny, _ = models("llama", kind)
    prompts = tiny.prompts([9, 4])
    found = [generate(tiny.folder, prompts, kind, dtype=dtype, percent=percent) for percent in PLACES.values()]
    assert found == found[:1] * len(found)


def copies(home) -> list[str]:
    return sorted(os.listdir(home / "converted")) if (home / "converted").exists() else []


def test_the_copy_is_made_once_and_replaced_when_the_checkpoint_changes(models, tmp_path):
    tiny, _ = models("llama", "int8")
    folder, home = shutil.copytree(tiny.folder, tmp_path / "model"), tmp_path / "home"
    prompts = tiny.prompts([5])
    before = generate(folder, prompts, "int8")
    made = copies(home)
    assert generate(folder, prompts, "int8") == before and copies(home) == made
    state = load_file(folder / "model.safetensors")
    save_file({name: w.flip(0) for name, w in state.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    assert generate(folder, prompts, "int8") != before
    assert len(copies(home)) == len(made) and copies(home) != made


def test_another_config_makes_another_copy(models, tmp_path):
    """A copy of fewer layers, for example, lacks tensors, which would be read as codes."""
    tiny, _ = models("llama", "int8")
    folder, prompts = shutil.copytree(tiny.folder, tmp_path / "model"), tiny.prompts([5])
    expected = generate(tiny.folder, prompts, "int8")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    generate(folder, prompts, "int8")
    (folder / "config.json").write_text(json.dumps(config))
    assert generate(folder, prompts, "int8") == expected


@pytest.mark.parametrize(
    "asked, message",
    [
        (dict(compress_cache="int5"), "`compress_cache` is one of"),
        (dict(compute="int4"), "`compute` is one of"),
        (dict(disk_mem=1000), "fewer bits take .* `disk_mem` is"),
    ],
    ids=str,
)
def test_wrong_options_are_reported_before_a_copy_is_made(models, tmp_path, asked, message):
    tiny, _ = models("llama", "int8")
    with pytest.raises(UserError, match=message):
        LLM(str(tiny.folder), compress_weight="int8", device="cpu", dtype="float32", progress=False, **asked)
    assert not copies(tmp_path / "home")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_error_names_weights_that_are_not_finite(models, tmp_path, bad):
    tiny, _ = models("llama", "int8")
    folder = shutil.copytree(tiny.folder, tmp_path / "model")
    state, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    state[name][3, 3] = bad
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    for kind in ("int8", "int4"):
        with pytest.raises(UserError, match=f"the weights '{name}' contain NaN or infinite values"):
            LLM(str(folder), compress_weight=kind, device="cpu", dtype="float32", progress=False)
    assert copies(tmp_path / "home") == ["lock"]


def test_a_width_that_no_group_divides_is_an_error(tiny):
    with pytest.raises(UserError, match="int4 is for groups of 64 or 32 inputs, and the 24 of .* use int8"):
        LLM(str(tiny("llama").folder), compress_weight="int4", device="cpu", dtype="float32", progress=False)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_random_weights_are_compressed_too(models, kind):
    tiny, _ = models("llama", kind)
    found = []
    for percent in (PLACES["gpu"], PLACES["disk"]):
        options = dict(path="_DUMMY_", compress_weight=kind, device="cpu", dtype="float32", progress=False)
        with LLM(str(tiny.folder), Policy(percent=percent), **options) as llm:
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            found.append(llm.generate([[5, 6, 7, 8]], params)[0].outputs[0].token_ids)
            disk = [llm.report[name]["disk"] for name in ("planned_memory_bytes", "peak_memory_bytes")]
    assert found[0] == found[1] and disk == [pytest.approx(disk[1], rel=0.1), disk[1]] and disk[1] > 0
