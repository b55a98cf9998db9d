"""Products of 16-bit numbers where the processor has none: as exact as float32 rounded once, in parts of any size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen.kernels import attention
from h2o_flexgen.kernels import linear as cpu

pytest_plugins = ["cli_tools"]

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture
def no_halves(monkeypatch):
    monkeypatch.setattr(cpu, "has_bf16", lambda: False)


def assert_rounded(got, exact):
    torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(got.dtype).eps, atol=1e-5)


@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=2),
    into=st.integers(1, 20),
    out=st.integers(1, 20),
    dtype=st.sampled_from(HALVES),
    bias=st.booleans(),
    limits=st.tuples(st.integers(1, 200), st.integers(1, 9), st.integers(0, 5)),
    seed=st.integers(0, 2**32),
)
def test_any_parts_give_the_product(shape, into, out, dtype, bias, limits, seed):
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(*s, into, generator=generator).to(dtype) for s in (shape, (out,)))
    b = torch.randn(out, generator=generator).to(dtype) if bias else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "has_bf16", lambda: False)
        for name, value in zip(("WIDEN_BYTES", "WIDEN_ROWS", "FEW"), limits):
            patch.setattr(cpu, name, value)
        patch.setattr(cpu, "FEWEST", 0)
        before = x.clone(), w.clone(), b
        got = cpu.linear(x, w, b)
    assert got.shape == (*shape, out) and got.dtype == dtype and got.is_contiguous()
    assert_rounded(got, F.linear(x.double(), w.double(), None if b is None else b.double()))
    assert torch.equal(x, before[0]) and torch.equal(w, before[1])


@pytest.mark.parametrize("rows", [1, 7, 8, 256, 257, 512, 513, 1100])
@pytest.mark.parametrize("dtype", HALVES)
def test_rows_around_the_limits_that_are_used(no_halves, dtype, rows):
    x, w, b = torch.randn(rows, 70).to(dtype), torch.randn(300, 70).to(dtype), torch.randn(300).to(dtype)
    exact = F.linear(x.double(), w.double(), b.double())
    torch.testing.assert_close(cpu.linear(x, w, b).double(), exact, rtol=0.02, atol=0.02)


def test_float32_and_processors_with_bf16_use_torch(monkeypatch):
    monkeypatch.setattr(cpu, "_widened", None)
    monkeypatch.setattr(cpu, "has_bf16", lambda: True)
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.randn(9, 5).to(dtype), torch.randn(7, 5).to(dtype)
        assert torch.equal(cpu.linear(x, w), F.linear(x, w))


def test_a_row_does_not_depend_on_how_many_there_are_but_for_rounding(no_halves):
    x, w = torch.randn(40, 64).bfloat16(), torch.randn(50, 64).bfloat16()
    torch.testing.assert_close(cpu.linear(x[:5], w), cpu.linear(x, w)[:5], rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("T", [5, 300])
def test_attention_over_a_prompt_is_that_of_float32(no_halves, dtype, T):
    q, k, v = torch.randn(3, 2, 3, T, 8).to(dtype)
    lengths = torch.tensor([T, T - 2])
    wide = attention.causal_attention_with_scores(q.float(), k.float(), v.float(), lengths)
    context, score = attention.causal_attention_with_scores(q, k, v, lengths)
    assert context.dtype == dtype
    assert_rounded(context, wide[0].double())
    torch.testing.assert_close(score, wide[1])
    torch.testing.assert_close(attention.causal_attention(q, k, v).float(), wide[0], rtol=0.05, atol=0.02)


def test_attention_over_a_cache_in_fp16_is_that_of_float32(monkeypatch):
    dtype = torch.float16
    q, k, v = torch.randn(2, 3, 1, 8).to(dtype), *torch.randn(2, 2, 3, 9, 8).to(dtype)
    empty = torch.rand(2, 3, 9) < 0.3
    empty[..., 0] = False
    parts = [[x.contiguous() for x in t.split((4, 5), 2)] for t in (k, v)]
    wide = attention.cached_attention(q.float(), *([x.float() for x in p] for p in parts), empty)
    for elements in (1, 100, 1 << 20):
        monkeypatch.setitem(attention.CHUNK_ELEMENTS, "cpu", elements)
        context, p = attention.cached_attention(q, *parts, empty)
        assert context.dtype == dtype
        assert_rounded(context, wide[0].double())
        torch.testing.assert_close(p, wide[1])


def test_other_default_types_change_nothing(no_halves):
    x, w = torch.randn(20, 8).bfloat16(), torch.randn(6, 8).bfloat16()
    wanted = cpu.linear(x, w)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(cpu.linear(x, w), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


packing = pytest.mark.skipif(not cpu.can_pack(), reason="no bf16 instructions, or a torch without the operators")


@packing
@pytest.mark.parametrize("rows", [(1,), (3, 1), (2, 17), (130,)])
@pytest.mark.parametrize("out, into", [(32, 64), (64, 256), (7, 5), (1, 48)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_matrix_gives_the_product(rows, out, into, bias):
    x, w = torch.randn(*rows, into).bfloat16(), torch.randn(out, into).bfloat16()
    b = torch.randn(out).bfloat16() if bias else None
    found = cpu.linear(x, cpu.pack(w), b)
    assert found.shape == (*rows, out) and found.is_contiguous()
    exact = F.linear(x.double(), w.double(), None if b is None else b.double())
    torch.testing.assert_close(found.double(), exact, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=0.1)


@packing
def test_only_matrices_that_stay_and_are_multiplied_are_packed(model):
    """Those of decoder layers at home on the device: not the table of words, whose rows are looked up."""
    from h2o_flexgen import LLM, Policy

    for percent, dtype in (((100, 0), "bfloat16"), ((0, 0), "bfloat16"), ((100, 0), "float32")):
        policy = Policy(2, 1, (*percent, 100, 0, 100, 0))
        with LLM(str(model), policy, device="cpu", dtype=dtype, progress=False) as llm:
            llm.generate([[5, 6, 7]])
            packed = {name for name, t in llm.runner.stores.weights.resident.items() if t.is_mkldnn}
            expected = {n for layer in llm.model.layers[1:-1] for n, s in layer.shapes.items() if len(s) == 2}
            assert packed == (expected if percent[0] and dtype == "bfloat16" else set())


def test_a_torch_without_the_operators(monkeypatch):
    def none(weight):
        raise AttributeError("no such operator")

    monkeypatch.setattr(cpu, "pack", none)
    assert not cpu.can_pack.__wrapped__()
