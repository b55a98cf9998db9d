"""OPT's layers against transformers' modules, and the configuration."""

from __future__ import annotations

import json

import pytest
import torch
import zoo
from transformers.models.opt import modeling_opt

from h2o_flexgen import UserError
from h2o_flexgen.kernels.attention import causal_attention
from h2o_flexgen.models import opt
from h2o_flexgen.models.registry import named_spec, read_spec, spec_of


def layer_weights(model, layer):
    state = model.hf.state_dict()
    return {short: state[name] for short, (name, _) in {**layer.streamed, **layer.gathered}.items()}


@pytest.mark.parametrize("name", zoo.CONFIGS)
def test_layers_name_every_tensor_of_the_checkpoint_in_its_shape(tiny, name):
    model = tiny(name)
    spec = read_spec(model.folder)
    state = {n: tuple(t.shape) for n, t in model.hf.state_dict().items()}
    if spec.tied:
        del state["lm_head.weight"]
    found = {}
    for layer in opt.tensors(spec):
        for tensor, shape in layer.shapes.items():
            assert found.setdefault(tensor, shape) == shape
    assert found == state


@pytest.mark.parametrize("name", zoo.CONFIGS)
def test_each_layer_is_that_of_transformers(tiny, name):
    model = tiny(name)
    spec = read_spec(model.folder)
    embed, *blocks, head = opt.tensors(spec)
    assert len(blocks) == spec.layers
    ids = torch.tensor(model.prompts([13, 13]))
    positions = torch.arange(13).expand_as(ids)
    with torch.inference_mode():
        expected = model.hf(ids, output_hidden_states=True)
        w = layer_weights(model, embed)
        hidden = opt.embed(spec, w, lambda short, rows: w[short][rows], ids, positions)
        for layer, wanted in zip(blocks, expected.hidden_states):
            torch.testing.assert_close(hidden, wanted, atol=1e-4, rtol=1e-4)
            before = hidden.clone()
            after = opt.block(spec, layer_weights(model, layer), hidden, None, causal_attention)
            assert torch.equal(hidden, before), "the input is another's: it must not change"
            hidden = after
        logits = opt.logits(spec, layer_weights(model, head), hidden[:, -1].contiguous())
    torch.testing.assert_close(logits, expected.logits[:, -1], atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_new", "silu", "tanh", "gelu_pytorch_tanh"])
def test_activations_are_those_of_transformers(name):
    x = torch.linspace(-5, 5, 101)
    expected = modeling_opt.ACT2FN[name](x.clone())
    assert torch.equal(opt.activation(name)(x.clone()), expected)


@pytest.mark.parametrize("name", zoo.CONFIGS)
def test_the_configuration_is_read_as_transformers_means_it(tiny, name):
    model = tiny(name)
    assert_same(read_spec(model.folder), model.hf.config)


def assert_same(spec, config):
    """A spec says what transformers' config says."""
    pairs = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "inner": "ffn_dim",
        "vocab": "vocab_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_attention_heads",
        "positions": "max_position_embeddings",
        "activation": "activation_function",
        "tied": "tie_word_embeddings",
        "word_width": "word_embed_proj_dim",
        "pre_norm": "do_layer_norm_before",
        "bias": "enable_bias",
        "affine": "layer_norm_elementwise_affine",
    }
    for ours, theirs in pairs.items():
        assert getattr(spec, ours) == getattr(config, theirs), ours
    assert spec.eos == {config.eos_token_id}
    assert spec.final_norm == (config.do_layer_norm_before and not config._remove_final_layer_norm)
    assert spec.head_dim * spec.heads == spec.hidden


GOOD = dict(
    model_type="opt",
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    ffn_dim=32,
    num_attention_heads=4,
    max_position_embeddings=64,
)


def test_what_a_config_leaves_out_has_the_defaults_of_transformers():
    from transformers import OPTConfig as Theirs

    assert_same(spec_of(GOOD), Theirs(**GOOD))
    assert spec_of({**GOOD, "word_embed_proj_dim": None}).word_width == 16


@pytest.mark.parametrize("eos, ids", [(2, {2}), ([2, 5], {2, 5}), (None, set()), ([], set())])
def test_eos_is_none_one_or_several(eos, ids):
    assert spec_of({**GOOD, "eos_token_id": eos}).eos == ids


@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(model_type="mamba"), "mamba"),
        (dict(vocab_size="50"), "vocab_size"),
        (dict(hidden_size=0), "hidden_size"),
        (dict(num_attention_heads=3), "not divisible"),
        (dict(num_hidden_layers=1.5), "num_hidden_layers"),
        (dict(ffn_dim=True), "ffn_dim"),
        (dict(max_position_embeddings=None), "max_position_embeddings"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**GOOD, **changes}))
    with pytest.raises(UserError, match=says):
        read_spec(tmp_path)


@pytest.mark.parametrize("key", [key for key in GOOD if key != "model_type"])
def test_a_config_without_a_needed_key_is_refused(key):
    with pytest.raises(UserError, match=key):
        spec_of({k: v for k, v in GOOD.items() if k != key})


@pytest.mark.parametrize("size", opt.SIZES)
def test_named_sizes_have_as_many_weights_as_their_name_says(size):
    tensors = {}
    for layer in opt.tensors(named_spec(f"facebook/opt-{size}")):
        tensors |= layer.shapes
    count = sum(torch.Size(shape).numel() for shape in tensors.values())
    said = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    assert count == pytest.approx(said, rel=0.06)
    assert named_spec("facebook/opt-iml-max-30b") == named_spec("opt-30b")
    assert named_spec("facebook/opt-9b") is None and named_spec("meta/opt-30b") is None
