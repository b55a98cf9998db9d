"""Which kernel, layout and type follow from measured rates."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import kernels

from h2o_flexgen.kernels.rates import HALF_TYPES, MARGIN, MIX, ROWS, KernelRates

rates = st.floats(1e9, 1e13)
tables = st.fixed_dictionaries({n: rates for n in ROWS})
measured = st.builds(
    KernelRates,
    st.fixed_dictionaries(
        {
            t: st.fixed_dictionaries({"native": tables, "widened": tables}, optional={"packed": tables})
            for t in HALF_TYPES
        }
        | {"float32": st.fixed_dictionaries({"native": tables})}
    ),
    st.fixed_dictionaries({t: rates for t in (*HALF_TYPES, "float32")}),
)


@given(measured, st.sampled_from(HALF_TYPES), st.sampled_from(ROWS))
def test_no_kernel_is_clearly_faster_than_the_chosen_one(found, dtype, rows):
    table = {name: found.linear[dtype][name][rows] for name in ("native", "widened")}
    assert max(table.values()) <= MARGIN * table[found.kernel(dtype, rows)] * (1 + 1e-9)


@given(measured, st.sampled_from(HALF_TYPES), st.integers(1, 5000))
def test_rows_that_were_not_measured_use_the_kernel_of_a_neighbour(found, dtype, rows):
    neighbours = {max((n for n in ROWS if n <= rows), default=1), min((n for n in ROWS if n >= rows), default=512)}
    assert found.kernel(dtype, rows) in {found.kernel(dtype, n) for n in neighbours}


@given(measured, st.sampled_from(HALF_TYPES))
def test_a_matrix_is_packed_only_if_that_is_faster_over_all_rows(found, dtype):
    def seconds(name):
        return sum(1 / found.linear[dtype][name][n] for n in MIX)

    if found.packs(dtype):
        assert seconds("packed") < min(seconds("native"), seconds("widened"))
    elif "packed" in found.linear[dtype]:
        best = sum(1 / max(found.linear[dtype][name][n] for name in ("native", "widened")) for n in MIX)
        assert seconds("packed") >= best / MARGIN * (1 - 1e-9)


@given(measured, st.sampled_from([None, "float32", *HALF_TYPES]))
def test_no_type_is_clearly_faster_than_the_chosen_one(found, stored):
    chosen = found.dtype(stored)
    allowed = ["bfloat16", "float32"] + ["float16"] * (stored != "bfloat16")
    assert chosen in allowed
    assert found.seconds(chosen) <= MARGIN * min(map(found.seconds, allowed)) * (1 + 1e-9)


def test_a_tie_goes_to_the_stored_type_then_to_range_then_to_memory():
    tie = kernels(bfloat16="native", float16="native")
    assert [tie.dtype(stored) for stored in (None, "float16", "bfloat16", "float32")] == [
        "bfloat16",
        "float16",
        "bfloat16",
        "bfloat16",
    ]
    like_fp32 = {t: {"native": dict.fromkeys(ROWS, 1e11)} for t in (*HALF_TYPES, "float32")}
    assert replace(tie, linear=like_fp32).dtype() == "bfloat16"


def test_a_cpu_whose_16_bit_matmuls_are_slow_computes_in_fp32():
    assert kernels().dtype("float16") == "float32"


def test_a_checkpoint_in_bf16_is_never_computed_in_fp16():
    fast = kernels(float16="native")
    assert fast.dtype("float16") == "float16"
    assert fast.dtype("bfloat16") == "float32"


def test_packed_matrices_count_for_the_type():
    assert kernels(packed=("bfloat16",)).dtype() == "bfloat16"


def test_attention_is_slow_in_a_type_unless_clearly_faster_than_fp32():
    found = replace(kernels(), attention={"float32": 1e11, "bfloat16": 1.05e11, "float16": 2e11})
    assert [found.prefers_fp32(t) for t in ("float32", "bfloat16", "float16")] == [False, True, False]


@given(measured)
def test_rates_survive_a_file(found):
    assert KernelRates.from_dict(json.loads(json.dumps(asdict(found)))) == found


@pytest.mark.parametrize(
    "change",
    [
        {"linear": {"bfloat16": {"native": {"1": 1e9}}}},
        {"linear": {"bfloat16": 3}},
        {"linear": None},
        {"attention": {"bfloat16": "fast"}},
    ],
)
def test_malformed_rates_are_rejected(change):
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        KernelRates.from_dict(asdict(kernels()) | change)


def test_rates_of_kernels_that_no_longer_exist_are_ignored():
    data = {"linear": {"int8": {"native": dict.fromkeys(ROWS, 1e9)}}, "attention": {}}
    current = KernelRates.from_dict(json.loads(json.dumps(data)))
    data["linear"]["int8"]["turned"] = dict.fromkeys(ROWS, 9e9)
    assert KernelRates.from_dict(json.loads(json.dumps(data))) == current
