"""Formats against plain arithmetic in fp32, and GGUF's types against the package `gguf`."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from format_tools import random_blocks, set_half

from h2o_flexgen.compiled import threads
from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import GGUF, Codes8, Dense, Int4, Int8, decode_bytes
from h2o_flexgen.formats import matrix as matrix_module
from h2o_flexgen.formats.forms import compressed
from h2o_flexgen.models.quantised.fp8 import E4M3
from h2o_flexgen.models.quantised.method import looked_up

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPE = (24, 192)
WIDE = (24, 512)  # of blocks of 256 elements


@pytest.fixture(params=["numba", "torch"])
def decoder(request, monkeypatch):
    """Both decoders: compiled loops, and torch's operators, which CUDA uses."""
    if request.param == "numba":
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(threads, "compiled", lambda: None)
    for name in ("PART", "BUFFERED_PART"):
        monkeypatch.setattr(matrix_module, name, 5 * SHAPE[1])  # several parts


def matrix(shape=SHAPE, seed=0) -> torch.Tensor:
    found = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    found[3] = 0.0
    found[5] *= 1e-3
    return found


def encoded(form, x: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(form.nbytes(tuple(x.shape)) + 64, dtype=torch.uint8)
    form.encode(x, buffer)
    assert not buffer[form.nbytes(tuple(x.shape)) :].any()
    return buffer


def decoded(form, buffer: torch.Tensor, shape=SHAPE, dtype=torch.float32) -> torch.Tensor:
    out = torch.full(shape, torch.nan, dtype=dtype)
    form.view(buffer, shape).decode(out)
    return out


def int8_oracle(x: torch.Tensor) -> torch.Tensor:
    rows = []
    for row in x:
        scale = np.float32(row.abs().max()) / np.float32(127)
        rows.append(torch.round(row / max(scale, np.finfo(np.float32).tiny)) * scale)
    return torch.stack(rows)


def int4_oracle(x: torch.Tensor, group: int) -> torch.Tensor:
    out = torch.empty_like(x)
    for r, row in enumerate(x):
        for at in range(0, len(row), group):
            part = row[at : at + group]
            scale, least = ((part.max() - part.min()) / 15).half().float(), part.min().half().float()
            codes = torch.round((part - least) / scale).clamp(0, 15) if scale > 0 else torch.zeros(group)
            out[r, at : at + group] = codes * scale + least
    return out


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_int8_has_a_scale_per_row(decoder, dtype):
    x = matrix()
    assert torch.equal(decoded(Int8(), encoded(Int8(), x), dtype=dtype), int8_oracle(x).to(dtype))


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_int4_has_a_scale_and_a_minimum_per_group(decoder, dtype, group):
    x, form = matrix(), Int4(group)
    assert torch.equal(decoded(form, encoded(form, x), dtype=dtype), int4_oracle(x, group).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", GGUF)
def test_a_gguf_type_decodes_as_in_the_package(decoder, name, dtype):
    raw = random_blocks(GGUF[name], WIDE)
    expected = torch.from_numpy(gguf.dequantize(raw.flatten(1).numpy(), gguf.GGMLQuantizationType[name]))
    assert GGUF[name].nbytes(WIDE) == raw.nbytes
    assert torch.equal(decoded(GGUF[name], raw.view(-1), WIDE, dtype), expected.to(dtype))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_weights_that_the_package_encodes_come_close(name):
    raw = torch.from_numpy(gguf.quantize(matrix().numpy(), gguf.GGMLQuantizationType[name]))
    assert (decoded(GGUF[name], raw.view(-1)) - matrix()).abs().max() < 0.3


@pytest.mark.parametrize("form", [Int8(), Int4(32), *GGUF.values()], ids=lambda form: form.name)
def test_rows_can_be_decoded_alone(decoder, form):
    raw = torch.randint(0, 60, (form.nbytes(WIDE),), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensor, whole = form.view(raw, WIDE), decoded(form, raw, WIDE)
    part = torch.empty(7, WIDE[1])
    tensor.decode(part, 11)
    assert torch.equal(part, whole[11:18])
    ids = torch.tensor([4, 0, 23, 4])
    part = torch.empty(4, WIDE[1])
    tensor.take(ids).decode(part)
    assert torch.equal(part, whole[ids])


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q6_K"])
def test_rows_of_heads_are_reordered(decoder, name):
    raw = torch.randint(0, 60, (GGUF[name].nbytes(WIDE),), dtype=torch.uint8)
    whole, reordered = decoded(GGUF[name], raw, WIDE), decoded(replace(GGUF[name], heads=3), raw, WIDE)
    assert torch.equal(reordered, whole.view(3, 4, 2, -1).transpose(1, 2).reshape(WIDE))


def test_threads_share_the_rows_of_a_large_matrix(monkeypatch):
    monkeypatch.setattr(threads, "SMALL", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    x = matrix()
    assert torch.equal(decoded(Int8(), encoded(Int8(), x)), int8_oracle(x))


@pytest.mark.parametrize("form", [Dense(torch.bfloat16), Int8(), Int4(64), *GGUF.values()], ids=lambda form: form.name)
def test_the_arrays_of_a_tensor_cover_its_bytes(form):
    arrays = form.arrays(WIDE)
    ends = [offset + WIDE[0] * size for offset, size in arrays]
    assert [offset for offset, _ in arrays] == [0, *ends[:-1]] and ends[-1] == form.nbytes(WIDE)


def test_bits_per_element():
    shape = (64, 4096)
    bits = {form.name: 8 * form.nbytes(shape) / (64 * 4096) for form in (Int8(), *GGUF.values())}
    assert bits.pop("int8") == 8 + 32 / 4096
    assert bits == {name: form.bits for name, form in GGUF.items()}
    assert (bits["Q8_0"], bits["Q4_K"], bits["Q6_K"], bits["MXFP4"]) == (8.5, 4.5, 6.5625, 4.25)
    assert [8 * Int4(group).nbytes(shape) / (64 * 4096) for group in (64, 32)] == [4.5, 5.0]


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("form", [Int8(), Int4(32)], ids=lambda form: form.name)
def test_values_that_are_not_finite_are_detected(form, bad):
    x = matrix()
    assert form.view(encoded(form, x), SHAPE).is_finite()
    x[7, 9] = bad
    assert not form.view(encoded(form, x), SHAPE).is_finite()


LAYERS = [{"words": (96, 20)}, {"q": (32, 64), "norm": (64,), "down": (64, 96)}, {"norm2": (64,), "head": (96, 20)}]


@pytest.mark.parametrize("exponent, is_finite", [(0, True), (252, True), (253, False), (255, False)])
def test_powers_of_two_whose_values_are_infinite_are_detected(decoder, exponent, is_finite):
    """2^125 * 12 is not in fp32, and 255 stands for NaN."""
    raw = random_blocks(GGUF["MXFP4"], SHAPE)
    raw[7, 2, 0] = exponent
    raw[7, 2, 1:] = 0x77
    matrix = GGUF["MXFP4"].view(raw.view(-1), SHAPE)
    assert matrix.is_finite() == is_finite == bool(matrix.to(torch.float32).isfinite().all())


@pytest.mark.parametrize("name", GGUF)
def test_one_block_may_begin_at_any_byte(decoder, name):
    form = GGUF[name]
    shape = 1, form.layout.size
    raw = random_blocks(form, shape).flatten()
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), raw])[1:]
    assert torch.equal(decoded(form, shifted, shape), decoded(form, raw, shape))


@pytest.mark.parametrize(
    "form",
    [GGUF["Q4_K"], GGUF["Q6_K"], GGUF["MXFP4"], looked_up("fp8", 128, E4M3), Int8()],
    ids=lambda form: form.name,
)
def test_decoding_by_torch_takes_the_planned_bytes(monkeypatch, form):
    monkeypatch.setattr(threads, "compiled", lambda: None)
    monkeypatch.setattr(matrix_module, "BUFFERED_PART", 1 << 18)
    shape = 512, 2048
    matrix = form.view(torch.zeros(form.nbytes(shape), dtype=torch.uint8), shape)
    found = Int8().view(torch.empty(Int8().nbytes(shape), dtype=torch.uint8), shape)
    for run in (lambda: matrix.to(torch.bfloat16), lambda: matrix.to_int8(found)):
        with torch.profiler.profile(profile_memory=True) as profile:
            run()
        held = most = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        result = 0 if run() is None else 2 * 512 * 2048
        assert most - result <= 1.02 * decode_bytes([form], torch.bfloat16, cuda=False)


def test_embedding_and_head_are_int8_and_vectors_stay_floats():
    assert compressed("int4", LAYERS) == {"words": Int8(), "q": Int4(64), "down": Int4(32), "head": Int8()}
    assert compressed("int8", LAYERS) == dict.fromkeys(("words", "q", "down", "head"), Int8())


def test_a_compression_that_does_not_fit_the_model_is_an_error():
    with pytest.raises(UserError, match="the 40 of 'q' cannot be cut into them: use int8"):
        compressed("int4", [{}, {"q": (8, 40)}, {}])
    for kind in ("int2", "q4_0"):  # the latter is for `convert` alone
        with pytest.raises(UserError, match=f"is one of int8, int4, not '{kind}'"):
            compressed(kind, LAYERS)


CONVERTED = [(form, 0) for form in (Int4(32), Int4(64), *GGUF.values())] + [(GGUF["Q4_0"], 3), (GGUF["Q6_K"], 3)]


@pytest.mark.parametrize("form, heads", CONVERTED, ids=lambda value: str(getattr(value, "name", value)))
def test_conversion_to_int8_gives_every_row_one_scale(decoder, form, heads):
    matrix = replace(form, heads=heads).view(random_blocks(form, WIDE).view(-1), WIDE)
    if form.layout.codes.is_signed:
        matrix.raw[matrix.raw == 128] = 129
    floats = torch.empty(WIDE)
    found = Int8().view(torch.zeros(Int8().nbytes(WIDE), dtype=torch.uint8), WIDE)
    matrix.decode(floats)
    matrix.to_int8(found)
    codes, scale = Int8().parts(found.raw, WIDE)
    possible = form.codes(matrix.raw, WIDE, 0, WIDE[0]).largest[matrix.order.argsort()]
    torch.testing.assert_close(scale, possible / 127)
    assert (floats.abs().amax(dim=1) <= 127.001 * scale).all()
    assert (codes - floats / scale[:, None]).abs().max() < 0.5001
    if not heads:  # some rows alone
        part = Int8().view(torch.zeros(Int8().nbytes((5, WIDE[1])), dtype=torch.uint8), (5, WIDE[1]))
        matrix.decode_into(part, 3)
        for found, expected in zip(Int8().parts(part.raw, part.shape), (codes, scale)):
            assert torch.equal(found, expected[3:8])


@pytest.mark.parametrize(
    "name, lowest, highest", [("Q8_0", -127, 127), ("Q4_0", -8, 7), ("Q4_1", 1, 16), ("Q5_0", -16, 15)]
)
def test_the_scale_of_a_row_depends_on_the_possible_codes(decoder, name, lowest, highest):
    """Not on the actual ones, which would take another pass over them."""
    form = GGUF[name]
    shape = (2, 64)
    raw = torch.zeros(2, 2, form.layout.nbytes, dtype=torch.uint8)
    set_half(raw, form.layout.scale_at, 1.0)
    if form.layout.minimum_at is not None:
        set_half(raw, form.layout.minimum_at, 1.0)
    out = Int8().view(torch.empty(Int8().nbytes(shape), dtype=torch.uint8), shape)
    form.view(raw.view(-1), shape).to_int8(out)
    assert torch.equal(Int8().parts(out.raw, shape)[1], torch.full((2,), max(-lowest, highest)) / 127)


def test_rows_far_below_their_scales_lose_nothing_in_int8(decoder):
    """The scales of FP8 may be those of a tensor or of 128 rows, and its small numbers are as precise as large ones."""
    form, shape = looked_up("fp8", 64, E4M3), SHAPE
    raw = torch.zeros(shape[0], 3, form.layout.nbytes, dtype=torch.uint8)
    raw[..., :4] = torch.ones(1).view(torch.uint8)
    values = (matrix() / 16).to(torch.float8_e4m3fn)
    raw[..., 4:] = values.view(torch.uint8).view(shape[0], 3, 64)
    found = Int8().view(torch.empty(Int8().nbytes(shape), dtype=torch.uint8), shape)
    form.view(raw.view(-1), shape).to_int8(found)
    step = values.float().abs().amax(1, keepdim=True) / 127
    assert ((found.to(torch.float32) - values.float()).abs() <= 0.5001 * step).all()


def test_weights_that_are_not_finite_remain_so_in_int8(decoder):
    form, shape = GGUF["Q4_0"], (2, 64)
    raw = torch.zeros(2, 2, form.layout.nbytes, dtype=torch.uint8)
    set_half(raw[1:, :1], 0, float("nan"))
    out = Int8().view(torch.empty(Int8().nbytes(shape), dtype=torch.uint8), shape)
    form.view(raw.view(-1), shape).to_int8(out)
    assert Int8().parts(out.raw, shape)[1].isfinite().tolist() == [True, False]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", [Codes8(64), Int4(64), Int4(32)], ids=["int8", "int4", "int4 of 32"])
def test_compiled_loops_encode_as_torch_does(monkeypatch, form, dtype):
    pytest.importorskip("numba")
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(2)) * torch.logspace(-9, 4, 4000)[:, None]
    x[1], x[2], x[3] = 0.0, 3.0, -70000.0
    x[4, 5], x[5, 6], x[6, 7], x[7] = torch.inf, -torch.inf, torch.nan, torch.inf
    x[8], x[9] = 1e-8, -1e-8  # scales too small for fp16
    x = x.to(dtype)

    def coded() -> torch.Tensor:
        """What x becomes when it is encoded and decoded."""
        buffer, out = torch.zeros(form.nbytes(tuple(x.shape)), dtype=torch.uint8), torch.empty(x.shape)
        form.encode(x, buffer)
        form.view(buffer, tuple(x.shape)).decode(out)
        return out

    compiled = coded()
    monkeypatch.setattr(threads, "compiled", lambda: None)
    torch.testing.assert_close(compiled, coded(), rtol=0, atol=0, equal_nan=True)
