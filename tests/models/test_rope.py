"""Rotary positions against transformers' rotary modules."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import fresh_rotary
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

from h2o_flexgen.models.registry import read_spec
from h2o_flexgen.models.rope import Positions, frequencies, rotation

ROTARY = [name for name, model_type in zoo.FAMILY.items() if model_type != "opt"]


def heads_of(spec, B, T, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(B, spec.heads, T, spec.head_dim, generator=generator)
    return q, torch.randn(B, spec.kv_heads, T, spec.head_dim, generator=generator)


def rotary_of(model, layer=0):
    """A new rotary module of a transformers model, as a layer calls it."""
    rotary = fresh_rotary(model.hf)
    types = model.hf.config.layer_types if model.name in zoo.BY_LAYER else None
    return rotary if types is None else partial(rotary, layer_type=types[layer])


def rotated_to(rope, positions, *heads):
    """Each of `heads` (B, H, T, D), rotated to positions (B, T)."""
    ends = positions.amax(1, keepdim=True) + 1
    at = Positions(positions.flatten(), ends.expand(positions.shape).flatten())
    found = []
    for x in heads:
        flat = x.transpose(1, 2).flatten(0, 1)
        found.append(rotation(rope, at, flat)(flat).unflatten(0, positions.shape).transpose(1, 2))
    return found


@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.parametrize("lengths", [[1], [15, 16, 17], [40, 3]], ids=str)
def test_each_row_is_rotated_as_transformers_does_it_alone(tiny, name, lengths):
    """Even with padding, and with dynamic RoPE and LongRoPE around the trained length of 16."""
    model = tiny(name)
    T = max(lengths)
    spec = read_spec(model.folder)
    positions = torch.stack([torch.arange(T).clamp(max=n - 1) for n in lengths])
    for layer, (b, n) in product(range(spec.layers), enumerate(lengths)):
        q, k = heads_of(spec.at(layer), len(lengths), T)
        before = q.clone()
        rotated = rotated_to(spec.at(layer).rope, positions, q, k)
        assert torch.equal(q, before)
        cos, sin = rotary_of(model, layer)(q, torch.arange(n)[None])
        if zoo.FAMILY[name] == "gpt_oss":  # it has each angle once
            cos, sin = (torch.cat([x, x], -1) for x in (cos, sin))
        expected = apply_rotary_pos_emb(q[b : b + 1, :, :n], k[b : b + 1, :, :n], cos, sin)
        for got, wanted in zip(rotated, expected):
            torch.testing.assert_close(got[b : b + 1, :, :n], wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("changes", [{}, {"factor": 8.0}, {"factor": 0.5}, {"attention_factor": 1.5}], ids=str)
def test_the_factor_of_longrope_is_that_of_transformers(tmp_path, changes):
    scaling = {"type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 2.5, 4.0], **changes}
    model = zoo.build("llama_longrope", tmp_path, rope_scaling=scaling)
    for length in (16, 17):
        rotary = fresh_rotary(model.hf)
        rotary(torch.zeros(1), torch.tensor([[length - 1]]))
        each, scale = frequencies(read_spec(tmp_path).rope, length)
        torch.testing.assert_close(each, rotary.inv_freq)
        assert scale == pytest.approx(rotary.attention_scaling)


@settings(max_examples=30)
@given(name=st.sampled_from(ROTARY), n=st.integers(1, 40), steps=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_a_decode_step_rotates_as_transformers_does_at_that_length(tiny, name, n, steps, seed):
    model = tiny(name)
    spec = read_spec(model.folder)
    rotary = rotary_of(model)
    q, k = heads_of(spec, 1, 1, seed)
    rotary(q, torch.arange(n)[None])
    for position in range(n, n + steps):
        at = torch.tensor([[position]])
        cos, sin = rotary(q, at)
        for got, wanted in zip(rotated_to(spec.at(0).rope, at, q, k), apply_rotary_pos_emb(q, k, cos, sin)):
            torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_narrow_types_are_rotated_by_angles_in_fp32(tiny, name, dtype):
    spec = read_spec(tiny(name).folder)
    q, _ = heads_of(spec, 2, 40)
    positions = torch.arange(40).expand(2, 40)
    q = q.to(dtype)
    (narrow,) = rotated_to(spec.rope, positions, q)
    assert narrow.dtype == dtype
    (wide,) = rotated_to(spec.rope, positions, q.float())
    torch.testing.assert_close(narrow.float(), wide, atol=0.04, rtol=0.02)
