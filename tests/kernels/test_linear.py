"""x @ W.T + b in 16 bits by every kernel: exact as fp32 rounded once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from machines import kernels

from h2o_flexgen.formats import dtype_name
from h2o_flexgen.kernels import attention, exact, int8, linear, timing
from h2o_flexgen.kernels.rates import KernelRates

pytest_plugins = ["command_tools"]

HALVES = [torch.bfloat16, torch.float16]


def matmul_in_fp64(x, w, b=None):
    return F.linear(x.double(), w.double(), None if b is None else b.double())


def assert_rounded(got, exact):
    torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(got.dtype).eps, atol=1e-5)


def use_kernel(name: str) -> None:
    linear.use(kernels(bfloat16=name, float16=name))


@pytest.fixture
def slow():
    """A CPU on which attention in 16 bits is slower than in fp32."""
    linear.use(kernels(slow=("bfloat16", "float16")))


@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=2),
    width=st.integers(1, 20),
    out=st.integers(1, 20),
    dtype=st.sampled_from(HALVES),
    bias=st.booleans(),
    limits=st.tuples(st.integers(1, 200), st.integers(1, 9), st.integers(0, 5)),
    seed=st.integers(0, 2**32),
)
def test_widening_any_slices_gives_the_matmul(shape, width, out, dtype, bias, limits, seed):
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(*s, width, generator=generator).to(dtype) for s in (shape, (out,)))
    b = torch.randn(out, generator=generator).to(dtype) if bias else None
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("WIDEN_BYTES", "WIDEN_ROWS", "LEFT_ROWS"), limits):
            patch.setattr(exact, name, value)
        before = x.clone(), w.clone()
        got = exact.widened(x, w, b)
    assert got.shape == (*shape, out) and got.dtype == dtype and got.is_contiguous()
    assert_rounded(got, matmul_in_fp64(x, w, b))
    assert torch.equal(x, before[0]) and torch.equal(w, before[1])


@pytest.mark.parametrize("rows", [1, 8, 257, 513])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", exact.KERNELS)
def test_every_kernel_gives_the_matmul_at_any_rows(name, dtype, rows):
    use_kernel(name)
    x, w, b = torch.randn(rows, 70).to(dtype), torch.randn(300, 70).to(dtype), torch.randn(300).to(dtype)
    torch.testing.assert_close(linear.linear(x, w, b).double(), matmul_in_fp64(x, w, b), rtol=0.02, atol=0.02)


def test_given_rates_choose_the_kernel(monkeypatch):
    called = []
    for name in exact.KERNELS:
        monkeypatch.setitem(exact.KERNELS, name, lambda x, w, b, name=name: called.append(name))
    x, w = torch.ones(4, 8).bfloat16(), torch.ones(8, 8).bfloat16()
    for name in exact.KERNELS:
        use_kernel(name)
        linear.linear(x, w)
    assert called == list(exact.KERNELS)


def test_float32_always_uses_torchs_own_kernel(monkeypatch):
    monkeypatch.setattr(exact, "KERNELS", {})
    x, w = torch.randn(9, 5), torch.randn(7, 5)
    assert torch.equal(linear.linear(x, w), F.linear(x, w))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("T", [5, 300])
def test_attention_over_a_prompt_equals_float32(slow, dtype, T):
    q, k, v = torch.randn(3, 2, 3, T, 8).to(dtype)
    weights = torch.rand(2, T)
    wide = attention.causal_attention_with_scores(q.float(), k.float(), v.float(), weights)
    context, score = attention.causal_attention_with_scores(q, k, v, weights)
    assert context.dtype == dtype
    assert_rounded(context, wide[0].double())
    torch.testing.assert_close(score, wide[1])
    torch.testing.assert_close(attention.causal_attention(q, k, v).float(), wide[0], rtol=0.05, atol=0.02)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", HALVES)
def test_loops_attend_to_a_cache_in_16_bits_where_matmuls_are_slow(slow, dtype, groups, monkeypatch):
    pytest.importorskip("numba")
    q, k, v = torch.randn(2, 3 * groups, 1, 8).to(dtype), *torch.randn(2, 2, 3, 9, 8).to(dtype)
    k[0, 0, 0, 0], v[0, 0, 1] = 1e-7, 6e-8  # smaller than fp16's normal numbers
    empty = torch.rand(2, 3, 9) < 0.3
    empty[..., 0] = False
    wide = attention.cached_attention(q.float(), [k.float()], [v.float()], empty=empty)
    monkeypatch.setattr(torch, "bmm", None)  # by loops
    for sizes in (9,), (4, 5):
        context, p = attention.cached_attention(
            q, *([x.contiguous() for x in t.split(sizes, 2)] for t in (k, v)), empty=empty
        )
        assert context.dtype == dtype
        assert_rounded(context, wide[0].double())
        torch.testing.assert_close(p, wide[1])


def test_an_overflow_in_an_fp16_cache_shows(slow):
    q, k, v = torch.ones(1, 1, 1, 8).half(), *torch.ones(2, 1, 1, 3, 8).half()
    v[0, 0, 1, 2] = float("inf")
    context, _ = attention.cached_attention(q, [k], [v], None)
    assert context.isinf().sum() == 1


def test_other_default_types_change_nothing():
    use_kernel("widened")
    x, w = torch.randn(20, 8).bfloat16(), torch.randn(6, 8).bfloat16()
    wanted = linear.linear(x, w)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(linear.linear(x, w), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


# measuring


@pytest.fixture
def small_matrices(monkeypatch):
    monkeypatch.setattr(timing, "FEW_ROWS_SHAPE", (48, 32))
    monkeypatch.setattr(timing, "MANY_ROWS_SHAPE", (32, 32))
    monkeypatch.setattr(timing, "ATTENTION_SHAPE", (2, 8, 4))


def test_every_kernel_that_runs_here_is_measured(small_matrices):
    found = linear.measure()
    assert set(found.linear) - {"int8", "int4"} == set(found.attention) == {"bfloat16", "float16", "float32"}
    assert ("int4" in found.linear) == int8.takes_blocks()
    left_out = "floats" if int8.KERNELS["tiled"].works else "tiled"
    assert set(found.linear["int8"]) - {"packed"} == {*int8.UNPACKED} - {left_out}
    for dtype in HALVES:
        packed = {"packed"} if exact.can_pack(dtype) else set()
        assert set(found.linear[dtype_name(dtype)]) == {*exact.KERNELS, *packed}
    assert set(found.linear["float32"]) == {"native"}
    assert KernelRates.from_dict(json.loads(json.dumps(asdict(found)))) == found


def test_a_kernel_that_is_far_too_slow_is_not_timed_with_more_rows(small_matrices, monkeypatch):
    called = []

    def slow(codes, weight):
        called.append(len(codes))
        time.sleep(0.3 if len(codes) >= 32 else 0)
        return int8.KERNELS["native"].sums(codes, weight)

    monkeypatch.setattr(int8.KERNELS["transposed"], "sums", slow)
    monkeypatch.setattr(timing, "INT8_SHAPE", (32, 32))
    rates = linear.measure().linear["int8"]["transposed"]
    assert max(called) == 32 and rates[32] == rates[128] == rates[512]


def test_the_first_use_measures_once_unless_rates_are_given(monkeypatch):
    measured: list[Callable] = []
    monkeypatch.setattr(linear, "measure", lambda: measured.append(1) or kernels(bfloat16="widened"))
    x = torch.ones(2, 4).bfloat16()
    linear.linear(x, x)
    assert measured == []
    linear.use(None)
    assert not linear.are_known()
    linear.linear(x, x)
    linear.linear(x, x)
    assert measured == [1] and linear.are_known()


def test_fp32_needs_no_measuring(monkeypatch):
    monkeypatch.setattr(linear, "measure", None)
    linear.use(None)
    x = torch.ones(2, 4)
    linear.linear(x, x)
    assert not linear.prefers_fp32(x) and not linear.packs(torch.float32)


# packed


def packing(dtype):
    return pytest.mark.skipif(not exact.can_pack(dtype), reason=f"this CPU or torch does not pack {dtype}")


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=packing(dtype)) for dtype in HALVES])
@pytest.mark.parametrize(
    "rows, out, width, bias",
    [((1,), 32, 64, True), ((3, 1), 64, 256, False), ((2, 17), 7, 5, True), ((130,), 1, 48, False)],
)
def test_a_packed_matrix_gives_the_matmul(rows, out, width, bias, dtype):
    x, w = torch.randn(*rows, width).to(dtype), torch.randn(out, width).to(dtype)
    b = torch.randn(out).to(dtype) if bias else None
    found = linear.linear(x, exact.pack(w), b)
    assert found.shape == (*rows, out) and found.is_contiguous()
    torch.testing.assert_close(found.double(), matmul_in_fp64(x, w, b), rtol=2 * torch.finfo(dtype).eps, atol=0.1)


@packing(torch.bfloat16)
@pytest.mark.parametrize(
    "percent, dtype, packs", [((100, 0), "bfloat16", True), ((0, 0), "bfloat16", False), ((100, 0), "float32", False)]
)
def test_only_resident_matrices_of_decoder_layers_are_packed(model, monkeypatch, percent, dtype, packs):
    """Not the embedding, whose rows are looked up."""
    from h2o_flexgen import LLM, Policy
    from h2o_flexgen.storage import weights

    linear.use(kernels(packed=("bfloat16",)))
    packed = []
    monkeypatch.setattr(weights, "pack", lambda w: packed.append(tuple(w.shape)) or exact.pack(w))
    policy = Policy(2, 1, (*percent, 100, 0, 100, 0))
    with LLM(str(model), policy, device="cpu", dtype=dtype, progress=False) as llm:
        llm.generate([[5, 6, 7]])
    matrices = [shape for layer in llm.model.layers[1:-1] for shape in layer.shapes.values() if len(shape) == 2]
    assert sorted(packed) == (sorted(matrices) if packs else [])


def test_a_torch_without_the_operators_does_not_pack(monkeypatch):
    def none(weight):
        raise AttributeError("no such operator")

    exact.can_pack.cache_clear()
    monkeypatch.setattr(exact, "pack", none)
    linear.use(kernels(packed=("bfloat16",)))
    assert not linear.packs(torch.bfloat16)
    exact.can_pack.cache_clear()
