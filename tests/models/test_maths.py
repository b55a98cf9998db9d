"""Each family's layers against transformers' modules, on the checkpoint that transformers writes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import zoo
from gguf_tools import apart
from oracle import fresh_rotary
from safetensors.torch import load_file
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from h2o_flexgen.kernels.attention import Softmax, causal_attention
from h2o_flexgen.models import spec as spec_module
from h2o_flexgen.models.parts import activation, centred_rms_norm
from h2o_flexgen.models.registry import family, read_spec
from h2o_flexgen.models.rope import Positions, rotate_to

T = 21  # longer than the trained length with dynamic RoPE and LongRoPE
#: of the tokens of two texts
POSITIONS = Positions(torch.arange(T).repeat(2), torch.full((2 * T,), T))


def attend_as(spec):
    """Causal attention of a layer over both texts, (2 * T, heads, D) each."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        softmax = Softmax(spec.scale, spec.cap, spec.window, sinks)
        q, k, v = (x.unflatten(0, (2, T)).transpose(1, 2) for x in (q, k, v))
        return causal_attention(q, k, v, softmax).transpose(1, 2).flatten(0, 1)

    return attend


def layers_of(spec):
    return family(spec.model_type).tensors(spec)


def checkpoint(model):
    state = apart(load_file(model.folder / "model.safetensors"))
    return {name: tensor.contiguous() for name, tensor in state.items()}


def layer_weights(state, layer):
    return {short: state[name] for short, (name, _) in {**layer.streamed, **layer.gathered}.items()}


def through(spec, state, layer, hidden, positions, attend):
    """The hidden states after a layer, whose experts all tokens go through one by one."""
    maths = family(spec.model_type)
    w = layer_weights(state, layer)
    if not layer.experts:
        return maths.block(spec, w, hidden, positions, attend)
    hidden = maths.attention(spec, w, hidden, positions, attend)
    x, routing = maths.route(spec, w, hidden)
    total = torch.zeros_like(x)
    for n in range(layer.experts):
        matrices = {short: [state[name.format(n)]] for short, (name, _) in layer.expert.items()}
        routing.add(range(n, n + 1), matrices, partial(maths.expert, spec), x, total)
    if layer.after:
        return maths.join(spec, {short: state[name] for short, (name, _) in layer.after.items()}, hidden, x, total)
    return hidden + total


def shapes_of(layer):
    """{name: shape} of a layer's tensors, of each expert by itself."""
    experts = {name.format(n): shape for n in range(layer.experts) for name, shape in layer.expert.values()}
    return experts | spec_module.shapes_of(unit for unit in layer.units if not unit.experts)


@pytest.mark.parametrize("name", zoo.CONFIGS)
def test_layers_name_every_tensor_of_the_checkpoint_in_its_shape(tiny, name):
    model = tiny(name)
    found = {}
    for layer in layers_of(read_spec(model.folder)):
        for tensor, shape in shapes_of(layer).items():
            assert found.setdefault(tensor, shape) == shape
    assert found == {tensor: tuple(t.shape) for tensor, t in checkpoint(model).items()}


@pytest.mark.parametrize("name", zoo.CONFIGS)
def test_each_layer_is_that_of_transformers(tiny, name):
    model = tiny(name)
    spec = read_spec(model.folder)
    state = checkpoint(model)
    maths = family(spec.model_type)
    embed, *blocks, head = layers_of(spec)
    assert len(blocks) == spec.layers
    ids = torch.tensor(model.prompts([T, T]))
    model.hf.base_model.rotary_emb = fresh_rotary(model.hf)
    with torch.inference_mode():
        expected = model.hf(ids, output_hidden_states=True)
        w = layer_weights(state, embed)
        hidden = maths.embed(spec, w, lambda short, rows: w[short][rows], ids.flatten(), POSITIONS)
        all_states = (states.flatten(0, 1) for states in expected.hidden_states)
        for n, (layer, wanted) in enumerate(zip(blocks, all_states)):
            own = spec.at(n)
            # each layer by itself, so that errors do not add up
            torch.testing.assert_close(hidden, wanted, atol=1e-3, rtol=1e-3)
            hidden = wanted.clone()
            after = through(own, state, layer, hidden, POSITIONS, attend_as(own))
            assert torch.equal(hidden, wanted), "the input must not change"
            hidden = after
        logits = maths.logits(spec, layer_weights(state, head), hidden.view(2, T, -1)[:, -1].contiguous())
    torch.testing.assert_close(logits, expected.logits[:, -1], atol=5e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, kind in zoo.FAMILY.items()
        if kind != "opt" and name not in zoo.BY_LENGTH and "longrope" not in name
    ],
)
def test_without_positions_attention_gets_unrotated_queries_and_keys(tiny, name):
    """Where the cache holds unrotated keys and rotates them at use."""
    model = tiny(name)
    spec = read_spec(model.folder)
    own = spec.at(0)
    block = checkpoint(model), layers_of(spec)[1]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2 * T, spec.hidden, generator=generator)

    def rotated(q, k, v, *sinks):
        q, k = (rotate_to(own.rope, x.transpose(0, 1), POSITIONS.at, T).transpose(0, 1) for x in (q, k))
        return attend_as(own)(q, k, v, *sinks)

    late = through(own, *block, hidden.clone(), None, rotated)
    early = through(own, *block, hidden.clone(), POSITIONS, attend_as(own))
    assert torch.allclose(late, early, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gemma_rounds_as_transformers_does(tiny, dtype):
    """Norms are rounded once, after the product with 1 + weight; the factor of the embedding is rounded too."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 40, generator=generator).to(dtype)
    norm = Gemma2RMSNorm(40)
    norm.weight.data = torch.randn(40, generator=generator).to(dtype)
    found = centred_rms_norm({"norm.weight": norm.weight.data}, "norm", x, 1e-6)
    # sums in another order may round a few differently
    assert found.dtype == dtype and (found != norm(x)).float().mean() < (0.01 if dtype != torch.float32 else 1)
    torch.testing.assert_close(found, norm(x))
    spec = replace(read_spec(tiny("gemma2").folder), hidden=40)
    ids = torch.arange(50)
    found = family("gemma2").embed(spec, {}, lambda _, rows: x[rows], ids, POSITIONS)
    assert torch.equal(found, x * torch.tensor(40**0.5).to(dtype))


@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_new", "gelu_fast", "silu", "tanh", "gelu_pytorch_tanh"])
def test_activations_are_those_of_transformers(name):
    x = torch.linspace(-5, 5, 101)
    assert torch.equal(activation(name)(x.clone()), ACT2FN[name](x.clone()))
