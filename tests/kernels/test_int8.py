"""Matmuls in int8 equal those of the same values in fp64, and do not depend on other rows or layers, to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from int8_oracle import activations, to_codes
from int8_oracle import int8_linear as slow_linear
from machines import kernels

from h2o_flexgen.formats import GGUF, Int4, Int8
from h2o_flexgen.kernels import int8, linear, operands
from h2o_flexgen.kernels.int8 import KERNELS, Kernel, Product, int8_linear
from h2o_flexgen.kernels.linear import slice_rows
from h2o_flexgen.kernels.operands import MAX_OUTLIERS, OUTLIER_RATIO, Int8Activations, Int8Weight
from h2o_flexgen.kernels.rates import ROWS

WIDTH, OUT = 200, 90


@pytest.fixture(params=["numba", "torch"])
def loops(request, monkeypatch):
    """Both implementations: compiled loops, and torch's operators, which CUDA uses."""
    if request.param == "numba":
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(int8, "compiled", lambda: None)
        monkeypatch.setattr(operands, "compiled", lambda: None)


def weights(out: int = OUT, width: int = WIDTH) -> tuple[torch.Tensor, Int8Weight]:
    w = torch.randn(out, width, generator=torch.Generator().manual_seed(1))
    w[2] = 0
    codes, scale = zip(*map(to_codes, w))
    return w, Int8Weight(torch.stack(codes).to(torch.int8), torch.tensor(scale))


@pytest.mark.parametrize("few, has_bias", [(MAX_OUTLIERS, True), (0, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_the_matmul_of_the_rounded_values(loops, dtype, has_bias, few):
    (w, weight), x = weights(), activations().to(dtype)
    bias = torch.randn(OUT).to(dtype) if has_bias else None
    exact = slow_linear(x.float(), w, bias, OUTLIER_RATIO, few)
    got = int8_linear(x, weight, bias, outliers=few > 0)
    assert got.dtype == dtype
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    error = (got.float() - exact).abs().amax(dim=1) / exact.abs().amax(dim=1).clamp(min=1e-3)
    assert error.max() < 2 * rounding


def test_outliers_cost_other_elements_no_precision(loops):
    _, weight = weights()
    x = activations()[20:21]  # with an outlier in column 5
    w = weight.codes * weight.scale[:, None]
    plain, kept = (int8_linear(x, weight, outliers=o) - x @ w.T for o in (False, True))
    assert kept.abs().max() < plain.abs().max() / 3


@given(rows=st.lists(st.integers(0, 36), min_size=1, max_size=12, unique=True))
def test_a_row_does_not_depend_on_its_neighbours(rows):
    pytest.importorskip("numba")
    (_, weight), x = weights(), activations()
    assert torch.equal(int8_linear(x[rows], weight), int8_linear(x, weight)[rows])


def test_threads_keep_the_outliers_that_others_find(monkeypatch):
    pytest.importorskip("numba")
    x = torch.randn(512, 4096)
    x.scatter_(1, torch.randint(4096, (512, 6)), 200)  # every column has some, in few rows
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = int8.quantise(x)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for _ in range(5):
        assert all(map(torch.equal, vars(int8.quantise(x)).values(), vars(alone).values()))


def test_layers_share_the_threads(monkeypatch):
    """Layers of several sizes, some too small for tiles; threads' parts end between layers or within them."""
    pytest.importorskip("numba")
    sizes, x = (90, 4, 3, 300, 5), activations(width=192)
    layers = [(weights(out, 192)[1], torch.randn(out) if out % 2 else None) for out in sizes]
    expected = [int8_linear(x, *layer) for layer in layers]
    monkeypatch.setattr("h2o_flexgen.compiled.threads.SMALL", -1)
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        found = int8.int8_linears(x, layers, kernel="tiled")
        assert all(map(torch.equal, found, expected))


def test_floats_beside_int8_stay_exact():
    (w, weight), x = weights(), activations()
    found = linear.linears(x, [(weight, None), (w, None), (weight, None)])
    expected = [int8_linear(x, weight), x @ w.T, int8_linear(x, weight)]
    assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[2])
    assert torch.allclose(found[1], expected[1], rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("width", [192, WIDTH], ids=["tiles", "no tiles"])
@pytest.mark.parametrize("kernel", int8.UNPACKED)
def test_every_kernel_gives_the_same_to_the_bit(kernel, width, monkeypatch):
    (_, weight), x, bias = weights(width=width), activations(width=width), torch.randn(OUT)
    expected = int8_linear(x, weight, bias)
    monkeypatch.setattr(int8, "WIDEN_BYTES", 4 * width * 7)
    assert torch.equal(int8_linear(x, weight, bias, kernel=kernel), expected)


@pytest.mark.parametrize("codes", ["int16", "uint8"])
@pytest.mark.parametrize("rows, width, out", [(1, 64, 4), (37, 576, 91), (6, 128, 300)])
def test_tiles_are_the_same_in_any_codes(codes, rows, width, out, monkeypatch):
    """In each of three threads, with outputs and rows left over and several blocks of the weight. CPUs without
    instructions for `uint8` compute it with others."""
    tiles = pytest.importorskip("h2o_flexgen.compiled.tiles")
    (_, weight), x, bias = weights(out, width), activations(rows, width), torch.randn(out)
    expected = int8_linear(x, weight, bias)
    monkeypatch.setattr(tiles, "CODES", np.dtype(codes))
    monkeypatch.setattr("h2o_flexgen.compiled.threads.SMALL", -1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert int8.may_tile(weight.codes.shape)
    assert torch.equal(int8_linear(x, weight, bias, kernel="tiled"), expected)


@pytest.mark.parametrize("codes", ["int16", "uint8"])
@pytest.mark.parametrize("sign", [1, -1])
def test_tiles_add_up_the_largest_codes(codes, sign, monkeypatch):
    tiles = pytest.importorskip("h2o_flexgen.compiled.tiles")
    monkeypatch.setattr(tiles, "CODES", np.dtype(codes))
    x, weight = torch.full((5, 16384), sign * 127).to(torch.int8), torch.full((6, 16384), 127, dtype=torch.int8)
    out = torch.empty(5, 6, dtype=torch.float64)
    KERNELS["tiled"].run(Int8Activations.of(x), [Product(Int8Weight(weight, torch.ones(6)), None, out)])
    assert (out == np.float32(sign * 16384 * 127 * 127)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_are_compiled_before_they_are_used(dtype):
    tiles = pytest.importorskip("h2o_flexgen.compiled.tiles")
    int8.prepare(dtype)
    known = len(tiles.multiply.signatures)
    int8_linear(activations(width=192).to(dtype), weights(width=192)[1], kernel="tiled")
    assert len(tiles.multiply.signatures) == known


def test_without_compiled_loops_there_are_no_tiles(monkeypatch):
    monkeypatch.setattr(int8, "compiled", lambda: None)
    assert not int8.Tiled().works


def test_a_packed_weight_gives_the_same_to_the_bit():
    if not int8.can_pack():
        pytest.skip("torch's operator is missing or wrong on this CPU")
    (_, weight), x, bias = weights(), activations(), torch.randn(OUT)
    packed = Int8Weight(int8.pack(weight.codes), weight.scale)
    assert packed.nbytes == weight.nbytes
    assert torch.equal(int8_linear(x, packed, bias), int8_linear(x, weight, bias))


def test_floats_add_up_the_largest_codes_exactly():
    width = 3 * int8.EXACT_COLUMNS + 5
    codes, weight = (torch.randint(126, 128, (n, width), dtype=torch.int8) for n in (3, 4))
    codes[1] *= -1
    assert torch.equal(KERNELS["floats"].sums(codes, weight).long(), codes.long() @ weight.long().T)


def test_many_rows_are_multiplied_in_parts(monkeypatch):
    (_, weight), x = weights(), activations()
    whole = int8_linear(x, weight)
    monkeypatch.setattr(int8, "INT8_ROWS", 10)
    assert torch.equal(int8_linear(x, weight), whole)


def test_floats_replace_a_kernel_that_does_not_work(monkeypatch):
    (_, weight), x = weights(), activations()
    expected = int8_linear(x, weight)
    called = []
    floats = KERNELS["floats"]
    monkeypatch.setattr(KERNELS["transposed"], "works", False)
    monkeypatch.setattr(floats, "sums", lambda *operands: called.append(1) or type(floats).sums(floats, *operands))
    assert torch.equal(int8_linear(x, weight), expected) and called


@pytest.mark.parametrize(
    "sums, works",
    [
        (lambda codes, weight: codes.float() @ weight.float().t(), True),
        (lambda codes, weight: (codes.float() @ weight.float().t()).clamp(-32768, 32767), False),  # sums in 16 bits
        (lambda codes, weight: torch.ops.onednn.no_such_operator(codes), False),
    ],
)
def test_a_wrong_or_missing_operator_is_detected(sums, works):
    kernel = Kernel()
    kernel.sums = sums
    assert kernel.works == works


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(loops, bad):
    (_, weight), x = weights(), activations()
    expected, broken = int8_linear(x, weight), x.clone()
    broken[4, 11] = bad
    got = int8_linear(broken, weight)
    assert not got[4].isfinite().any()
    others = [n for n in range(len(x)) if n != 4]
    assert torch.equal(got[others], expected[others])


def test_linear_multiplies_an_int8_weight():
    (_, weight), x = weights(), activations()
    assert torch.equal(linear.linear(x[None], weight)[0], int8_linear(x, weight))
    assert torch.equal(linear.linear(x, weight, outliers=False), int8_linear(x, weight, outliers=False))


def test_the_rates_choose_the_kernel_by_rows():
    rates = kernels()
    fast, slow = {n: 2e12 for n in ROWS}, {n: 1e12 if n < 100 else 3e12 for n in ROWS}
    rates.linear["int8"] = {"native": slow, "transposed": fast}
    linear.use(rates)
    assert [linear._chosen_int8(rows) for rows in (1, 30, 128, 2000)] == ["transposed"] * 2 + ["native"] * 2


def test_packing_is_chosen_by_the_rates():
    for packs in (True, False):
        rates = kernels()
        rows = {n: 1e12 for n in ROWS}
        rates.linear["int8"] = {"native": rows, "packed": {n: 2e12 if packs else 5e11 for n in ROWS}}
        linear.use(rates)
        assert linear.packs_int8() == (packs and int8.can_pack())
    del rates.linear["int8"]  # as in older profiles
    linear.use(rates)
    assert not linear.packs_int8()


@pytest.mark.parametrize("form", [Int4(32), GGUF["Q8_0"], GGUF["Q4_1"]], ids=lambda form: form.name)
def test_a_head_goes_in_slices(form, monkeypatch):
    """Each is converted to codes of 8 bits; together they give the matmul of the whole, to the bit."""
    shape, x, bias = (90, 192), activations(width=192), torch.randn(90)
    raw = torch.randint(0, 60, (form.nbytes(shape),), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    weight, eights = form.view(raw, shape), Int8().view(torch.zeros(Int8().nbytes(shape), dtype=torch.uint8), shape)
    weight.to_int8(eights)
    expected = int8_linear(x, Int8Weight(*Int8().parts(eights.raw, shape)), bias)
    monkeypatch.setattr(linear, "slice_rows", lambda width, itemsize: 7)
    assert torch.equal(linear.linear(x, replace(weight, operand=Int8()), bias), expected)
    assert (linear.linear(x, weight, bias) - expected).abs().max() > 0


@pytest.mark.parametrize("width", [576, 896, 1536, 3584])
def test_slices_of_a_head_have_multiples_of_16_rows(width):
    assert slice_rows(width, 1) % 16 == slice_rows(width, 4) % 16 == 0
