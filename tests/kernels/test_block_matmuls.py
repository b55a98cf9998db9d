"""Int8 matmuls with weights in blocks agree with matmuls of the same numbers in fp64, and are bit-identical
whatever else is multiplied in the same call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from format_tools import random_blocks, set_half
from hypothesis import given
from hypothesis import strategies as st
from int8_oracle import activations, in_blocks
from machines import kernels

from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import GGUF, Dense, Int4, Int8, Quantised
from h2o_flexgen.formats.layout import EXPONENT
from h2o_flexgen.kernels import int8, linear
from h2o_flexgen.kernels.int8 import int8_linear, int8_linears
from h2o_flexgen.kernels.linear import linears
from h2o_flexgen.kernels.operands import Grouped
from h2o_flexgen.kernels.rates import ROWS
from h2o_flexgen.models.quantised.method import zeroed

block_tiles = pytest.importorskip("h2o_flexgen.compiled.block_tiles")
pytestmark = pytest.mark.usefixtures("fast_blocks")
#: by how their tiles multiply: codes of 4 bits, of 5, with scales for 16 codes
FORMATS = [GGUF["Q4_0"], Int4(64), GGUF["Q4_K"], GGUF["Q5_1"], GGUF["MXFP4"], GGUF["Q6_K"], GGUF["Q3_K"]]
OTHERS = [GGUF["Q4_1"], Int4(32), GGUF["Q5_0"], GGUF["Q5_K"], GGUF["Q2_K"]]
every_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.name} {form.layout.group}")


def blocks(form, out: int, width: int, seed: int = 0) -> Quantised:
    """A row of zeros and random ones, `width` rounded up to whole blocks."""
    width = -(-width // form.layout.size) * form.layout.size
    raw = random_blocks(form, (out, width), seed)
    raw[0] = 0
    return Quantised(form, raw.view(-1), (out, width), form)


def expected(x: torch.Tensor, weight: Quantised, bias: torch.Tensor | None, outliers: bool = True) -> torch.Tensor:
    rows, w = int8.quantise(x, outliers), in_blocks(weight)
    found = rows.scale[:, None].double() * (rows.codes.double() @ w.T) + rows.kept.double() @ w[:, rows.places].T
    return found if bias is None else found + bias.double()


SIZES = [(1, 1, 64), (2, 17, 128), (3, 5, 576), (37, 90, 2048), (5, 33, 2048 + 64), (4, 20, 4096 + 192), (9, 16, 6144)]
CASES = [(form, *sizes) for form in FORMATS for sizes in SIZES] + [(form, 37, 90, 2304) for form in OTHERS]


@pytest.mark.parametrize("form, rows, out, width", CASES, ids=lambda value: getattr(value, "name", str(value)))
def test_it_is_the_matmul_of_the_decoded_blocks(form, rows, out, width):
    weight = blocks(form, out, width)
    x = activations(rows, weight.shape[1])
    for bias, outliers in ((None, True), (torch.randn(out), False)):
        exact = expected(x, weight, bias, outliers)
        error = (int8_linear(x, weight, bias, outliers) - exact).abs().amax(dim=1)
        assert (error <= 1e-5 * exact.abs().amax(dim=1).clamp(min=1e-3)).all()


@every_format
def test_its_numbers_are_close_to_the_decoded_ones(form):
    """A scale is rounded by at most half of 1/8,000 of the segment's largest, and counts up to half of the codes."""
    weight = blocks(form, 20, 2048)
    stored = torch.empty(20, 2048)
    weight.decode(stored)
    lowest, highest = form.layout.codes.bounds
    largest = weight.format.codes(weight.raw, weight.shape, 0, 20).largest[:, None]
    step = largest / 8000 * (0.5 + (highest - lowest) / 4)
    assert ((in_blocks(weight) - stored).abs() <= step + 1e-12).all()


@every_format
def test_a_group_gives_each_member_its_rows(form):
    """As if each were multiplied alone, to the bit."""
    counts = [3, 1, 40, 9]
    weights = [[blocks(form, out, 768, seed + 7 * out) for seed in range(4)] for out in (90, 20)]
    biases = [torch.randn(4, 90), None]
    x = activations(sum(counts), 768)
    layers = []
    for members, bias in zip(weights, biases):
        layers.append((Grouped(members, counts), None if bias is None else Grouped(list(bias), counts)))
    for got, members, bias in zip(linears(x, layers), weights, biases):
        each = enumerate(zip(x.split(counts), members))
        alone = [int8_linear(rows, member, None if bias is None else bias[n]) for n, (rows, member) in each]
        assert torch.equal(got, torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_are_rounded_once(dtype):
    weight, x = blocks(Int4(64), 40, 256), activations(7, 256).to(dtype)
    int8.prepare(dtype)
    known = len(block_tiles.multiply.signatures), len(block_tiles.arrange.signatures)
    exact = expected(x.float(), weight, None)
    got = int8_linear(x, weight)
    assert got.dtype == dtype and known == (len(block_tiles.multiply.signatures), len(block_tiles.arrange.signatures))
    error = (got.double() - exact).abs().amax(dim=1) / exact.abs().amax(dim=1).clamp(min=1e-3)
    assert error.max() < max(torch.finfo(dtype).eps, 1e-5)


@given(rows=st.lists(st.integers(0, 36), min_size=1, max_size=12, unique=True))
def test_a_row_does_not_depend_on_its_neighbours(rows):
    weight, x = blocks(Int4(64), 21, 576), activations(width=576)
    assert torch.equal(int8_linear(x[rows], weight), int8_linear(x, weight)[rows])


def test_interleaved_rows_of_heads_are_reordered():
    """Rows of queries and keys, which llama.cpp stores in another order."""
    weight, x, bias = blocks(GGUF["Q4_0"], 24, 64), activations(5, 64), torch.randn(24)
    in_heads = replace(weight, format=replace(weight.format, heads=3))
    found = int8_linear(x, weight)
    assert torch.equal(int8_linear(x, in_heads)[:, in_heads.order], found)
    assert torch.equal(int8_linear(x, in_heads, bias), int8_linear(x, in_heads) + bias)


def test_threads_share_layers_of_all_kinds(monkeypatch):
    """Several formats and sizes, cut between layers and within them."""
    x, codes = activations(width=192), torch.randint(-127, 128, (90, 192), dtype=torch.int8)
    layers = [
        (blocks(form, out, 192), torch.randn(out)) for form, out in zip(FORMATS * 2, (90, 4, 3, 300, 1, 5, 16, 33))
    ]
    layers.insert(3, (int8.Int8Weight(codes, torch.rand(90)), None))
    expected = [int8_linear(x, *layer, kernel="tiled") for layer in layers]
    monkeypatch.setattr("h2o_flexgen.compiled.threads.SMALL", -1)
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        assert all(map(torch.equal, int8_linears(x, layers, kernel="tiled"), expected))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("byte", [0, 0x88, 0xFF])
@pytest.mark.parametrize("form", [*FORMATS, *OTHERS], ids=lambda form: f"{form.name} {form.layout.group}")
def test_the_largest_sums_do_not_overflow(form, sign, byte):
    layout = form.layout
    weight = blocks(form, 4, 4096)
    raw = weight.raw.view(4, -1, layout.nbytes)
    raw[:] = byte
    if layout.scale_kind == EXPONENT:
        raw[..., layout.scale_at] = 128
    else:
        set_half(raw, layout.scale_at, 1.0)
    if layout.minimum_at is not None:
        set_half(raw, layout.minimum_at, -8.0)
    x = torch.full((3, 4096), sign * 127.0)
    found = int8_linear(x, weight)
    exact = x.double() @ in_blocks(weight).T
    assert torch.allclose(found.double(), exact, rtol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_scales_make_non_finite_outputs(bad):
    weight, x = blocks(Int4(64), 8, 128), activations(5, 128)
    good = int8_linear(x, weight)
    weight.raw.view(8, 2, -1)[3, 1, :2] = torch.tensor([bad]).half().view(torch.uint8)
    found, others = int8_linear(x, weight), [n for n in range(8) if n != 3]
    assert not found[:, 3].isfinite().any() and torch.equal(found[:, others], good[:, others])


def test_linear_multiplies_blocks_whose_operand_is_their_format():
    weight, x = blocks(Int4(64), 90, 192), activations(width=192)
    expected = int8_linear(x, weight)
    linear.use(kernels())  # what was measured later changes nothing
    assert torch.equal(linear.linear(x, weight), expected)
    for operand in (Int8(), None):
        assert not torch.equal(linear.linear(x, replace(weight, operand=operand)), expected)


MIXED = (Int8(), Int4(64), Dense(torch.float32), GGUF["Q4_K"], GGUF["Q8_0"], GGUF["IQ4_NL"])
UNPACKED = {"int8": "int8", "int4": "int8", "Q4_K": "int8", "Q8_0": "int8", "IQ4_NL": "int8"}
#: the codes of the others are too large
AS_STORED = UNPACKED | {"int4": "int4", "Q4_K": "Q4_K"}


def test_what_int8_matmuls_read_is_decided_for_each_format():
    assert linear.int8_operands(MIXED, cuda=False) == linear.int8_operands(MIXED, False, True) == AS_STORED
    assert linear.int8_operands(MIXED, cuda=True) == linear.int8_operands(MIXED, False, False) == UNPACKED
    rates = kernels(blocks=True)
    rates.linear["Q4_K"] = {"tiled": dict.fromkeys(ROWS, 1e9)}
    linear.use(rates)
    assert linear.int8_operands(MIXED, False) == UNPACKED | {"int4": "int4"}
    assert linear.int8_operands(MIXED, False, True) == AS_STORED
    linear.use(kernels())
    assert linear.int8_operands(MIXED, False) == UNPACKED
    assert linear.int8_operands(MIXED, False, True) == linear.int8_operands(MIXED, False, AS_STORED) == AS_STORED


@pytest.mark.parametrize("sizes", [(64, 8), (8, 64)])
def test_blocks_of_one_name_are_read_as_stored_if_some_can(sizes):
    formats = [zeroed("gptq", size) for size in sizes]
    assert linear.int8_operands(formats, False, True) == {"gptq": "gptq"}
    assert linear.int8_operands(formats[sizes.index(8) :][:1], False, True) == {"gptq": "int8"}


def test_operands_of_an_earlier_job_are_those_of_this_one(monkeypatch):
    some = UNPACKED | {"Q4_K": "Q4_K"}
    assert linear.int8_operands(MIXED, False, some) == some
    monkeypatch.setattr(int8, "takes_blocks", lambda: False)
    assert linear.int8_operands(MIXED, False, UNPACKED) == linear.int8_operands(MIXED, False) == UNPACKED
    for asked in (True, some):
        with pytest.raises(UserError, match="`in_blocks`, or the job .* needs a CPU with AVX2"):
            linear.int8_operands(MIXED, False, asked)


def test_a_job_reports_a_gain_from_int8():
    rates = kernels(blocks=True, bfloat16="native")
    rates.linear["int8"] = {"native": dict.fromkeys(ROWS, 1e11)}
    assert rates.gains_by_int8("bfloat16")
    del rates.linear["int4"]
    assert not rates.gains_by_int8("bfloat16")


@pytest.mark.parametrize("speed, takes", [(1.0, True), (0.95, True), (0.5, False)])
def test_the_rates_of_many_rows_decide(speed, takes):
    rates = kernels(blocks=True)
    rates.linear["int4"]["tiled"] = {n: 8e11 * speed if n >= 32 else 1e9 for n in ROWS}
    assert rates.takes_blocks() == takes
