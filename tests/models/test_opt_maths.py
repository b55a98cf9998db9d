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
from h2o_flexgen.models.config import OPT_SIZES, OPTConfig


def layer_weights(model, layer):
    state = {name.removeprefix("model."): t for name, t in model.hf.state_dict().items()}
    return {short: state[name] for short, (name, _) in {**layer.streamed, **layer.gathered}.items()}


@pytest.mark.parametrize("name", zoo.CONFIGS)
def test_layers_name_every_tensor_of_the_checkpoint_in_its_shape(tiny, name):
    model = tiny(name)
    config = OPTConfig.from_folder(model.folder)
    state = {n.removeprefix("model."): tuple(t.shape) for n, t in model.hf.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    found = {}
    for layer in opt.layers(config):
        for tensor, shape in (*layer.streamed.values(), *layer.gathered.values()):
            assert found.setdefault(tensor, shape) == shape
    assert found == state


@pytest.mark.parametrize("name", zoo.CONFIGS)
def test_each_layer_is_that_of_transformers(tiny, name):
    model = tiny(name)
    config = OPTConfig.from_folder(model.folder)
    embed, *decoder, head = opt.layers(config)
    assert len(decoder) == config.num_hidden_layers
    ids = torch.tensor(model.prompts([13, 13]))
    with torch.inference_mode():
        expected = model.hf(ids, output_hidden_states=True)
        w = layer_weights(model, embed)
        positions = w["positions"][torch.arange(13) + opt.POSITION_OFFSET].expand(2, -1, -1)
        hidden = opt.embed(w["words"][ids], positions, w)
        for layer, wanted in zip(decoder, expected.hidden_states):
            torch.testing.assert_close(hidden, wanted, atol=1e-4, rtol=1e-4)
            before = hidden.clone()
            after = opt.decoder_layer(config, layer_weights(model, layer), hidden, causal_attention)
            assert torch.equal(hidden, before), "the input is another's: it must not change"
            hidden = after
        logits = opt.logits(config, layer_weights(model, head), hidden[:, -1].contiguous())
    torch.testing.assert_close(logits, expected.logits[:, -1], atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_new", "silu", "tanh", "gelu_pytorch_tanh"])
def test_activations_are_those_of_transformers(name):
    x = torch.linspace(-5, 5, 101)
    expected = modeling_opt.ACT2FN[name](x.clone())
    assert torch.equal(opt.activation(name)(x.clone()), expected)


@pytest.mark.parametrize("name", zoo.CONFIGS)
def test_the_configuration_is_read_as_transformers_means_it(tiny, name):
    model = tiny(name)
    config = OPTConfig.from_folder(model.folder)
    for key in OPTConfig.__dataclass_fields__:
        assert getattr(config, key) == getattr(model.hf.config, key), key
    assert config.head_dim * config.num_attention_heads == config.hidden_size


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

    ours, theirs = OPTConfig.from_dict(GOOD), Theirs(**GOOD)
    for key in OPTConfig.__dataclass_fields__:
        assert getattr(ours, key) == getattr(theirs, key), key
    assert OPTConfig.from_dict({**GOOD, "word_embed_proj_dim": None}).word_embed_proj_dim == 16


@pytest.mark.parametrize("eos, ids", [(2, {2}), ([2, 5], {2, 5}), (None, set()), ([], set())])
def test_eos_is_none_one_or_several(eos, ids):
    assert OPTConfig.from_dict({**GOOD, "eos_token_id": eos}).eos_ids == ids


@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(model_type="llama"), "llama"),
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
        OPTConfig.from_folder(tmp_path)


@pytest.mark.parametrize("key", [key for key in GOOD if key != "model_type"])
def test_a_config_without_a_needed_key_is_refused(key):
    with pytest.raises(UserError, match=key):
        OPTConfig.from_dict({k: v for k, v in GOOD.items() if k != key})


@pytest.mark.parametrize("size", OPT_SIZES)
def test_named_sizes_have_as_many_weights_as_their_name_says(size):
    config = OPTConfig.named(f"facebook/opt-{size}")
    tensors = {}
    for layer in opt.layers(config):
        tensors |= dict((*layer.streamed.values(), *layer.gathered.values()))
    count = sum(torch.Size(shape).numel() for shape in tensors.values())
    said = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    assert count == pytest.approx(said, rel=0.06)
    assert OPTConfig.named("facebook/opt-iml-max-30b") == OPTConfig.named("opt-30b")
    assert OPTConfig.named("facebook/opt-9b") is None and OPTConfig.named("meta/opt-30b") is None
