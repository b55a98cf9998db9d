"""A hardware profile: plain data that survives a file and refuses nonsense."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import KERNELS, laptop

from h2o_flexgen.errors import UserError
from h2o_flexgen.machine.profile import Profile, interpolate


@pytest.mark.parametrize("kernels", [None, KERNELS])
def test_a_profile_survives_a_file(tmp_path, kernels):
    profile = laptop(matmul=PROFILE.matmul, kernels=kernels)
    (tmp_path / "p.json").write_text(profile.to_json())
    assert Profile.from_file(tmp_path / "p.json") == profile


def test_unmeasured_resident_matmuls_have_the_rate_of_streamed_ones():
    profile = laptop()
    assert "resident" not in profile.matmul
    assert profile.matmul_seconds((768, 768), 8, resident=True) == profile.matmul_seconds((768, 768), 8)


SHAPES = [(768, 768), (2048, 2048), (8192, 2048), (2048, 8192), (50272, 768)]
#: each shape has a rate of its own
TABLES = {shape: {1: 1e9 * n, 100: 1e11 * n} for n, shape in enumerate(SHAPES, 1)}
PROFILE = laptop(matmul={"streamed": TABLES, "resident": {shape: {1: 1e12} for shape in SHAPES}})


@pytest.mark.parametrize(
    "shape, like",
    [(shape, shape) for shape in SHAPES]
    + [
        ((576, 576), (768, 768)),
        ((192, 576), (768, 768)),
        ((3072, 3072), (2048, 2048)),
        ((11008, 4096), (8192, 2048)),
        ((4096, 11008), (2048, 8192)),
        ((49152, 576), (50272, 768)),
        ((32000, 2048), (50272, 768)),
    ],
)
def test_a_matmul_has_the_rate_of_the_nearest_shape(shape, like):
    flops = 2 * shape[0] * shape[1]
    n = 1 + SHAPES.index(like)
    assert PROFILE.matmul_seconds(shape, 1) == pytest.approx(flops / (1e9 * n))
    assert PROFILE.matmul_seconds(shape, 10) == pytest.approx(10 * flops / (1e10 * n))
    assert PROFILE.matmul_seconds(shape, 10, resident=True) == pytest.approx(10 * flops / 1e12)


def damaged(path: str, value) -> dict:
    """A part of a profile with one value replaced, at a path such as "links/disk_to_cpu/bytes_per_s"."""
    part, *folders, name = path.split("/")
    inner = whole = json.loads(laptop().to_json())[part]
    for key in folders:
        inner = inner[key]
    inner[name] = value
    return {part: whole}


NUMBERS = (-5, 0, float("nan"), "7", None)


@pytest.mark.parametrize(
    "change",
    [
        *(damaged("links/disk_to_cpu/bytes_per_s", x) for x in NUMBERS),
        *(damaged("matmul/streamed/768x768", {"1": x}) for x in (-5, 0, float("nan"), "x", None)),
        damaged("matmul/streamed/768x768", {}),
        damaged("matmul/streamed", {"0x0": {"1": 1.0}}),
        damaged("matmul/streamed", {}),
        *(damaged("attention/decode/h2o/grouped", x) for x in NUMBERS),
        damaged("attention/decode/h2o/rates", {}),
        damaged("links/disk_to_cpu/slowed_by_compute", 2),
        *(damaged("memory/gpu", x) for x in (-5, "7", None)),
        {"matmul": {}},
        {"attention": {}},
        {"device": "cuda"},  # without attention on the CPU
        {"device": "tpu"},
        {"dtype": "foo"},
        {"dtype": 5},
        {"machine": []},
        {"links": {}},
        {"links": {**json.loads(laptop().to_json())["links"], "disk_to_cpu": {"rate": 1}}},
        {"matmul": {"streamed": {"768x768": [[1, 5]]}}},
        {"matmul": {"streamed": {"768x768": {"1": "fast"}}}},
        {"attention": {"decode": {"full": {"rates": {"64": 1}}}}},
        {"attention": {"decode": dict.fromkeys(("full", "h2o"), {"rates": 1})}},
        {"kernels": {"linear": {"bfloat16": {}}}},
        {"kernels": 3},
    ],
)
def test_nonsense_is_refused(tmp_path, change):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(json.loads(laptop().to_json()) | change))
    with pytest.raises(UserError, match="not a hardware profile"):
        Profile.from_file(path)


@pytest.mark.parametrize("text", ["", "[]", "3", '{"device": "cpu"}', "{", "[" * 100_000])
def test_a_file_that_is_no_profile_is_refused(tmp_path, text):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(UserError, match="p.json"):
        Profile.from_file(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read the hardware profile"):
        Profile.from_file(tmp_path / "none.json")


tables = st.dictionaries(st.integers(1, 4096), st.floats(1e3, 1e15), min_size=1, max_size=6)


@given(tables, st.integers(1, 10_000))
def test_interpolated_values_stay_within_the_table(table, x):
    value = interpolate(table, x)
    assert min(table.values()) * (1 - 1e-9) <= value <= max(table.values()) * (1 + 1e-9)
    if x in table:
        assert value == pytest.approx(table[x])
