"""A hardware profile: plain data that survives a file and refuses nonsense."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import laptop

from h2o_flexgen.errors import UserError
from h2o_flexgen.planning.profile import Profile, between


def test_a_profile_survives_a_file(tmp_path):
    profile = laptop(cpu_attention={"full": {64: 1e10}, "h2o": {64: 1e10}})
    (tmp_path / "p.json").write_text(profile.to_json())
    assert Profile.from_file(tmp_path / "p.json") == profile


@pytest.mark.parametrize(
    "change",
    [
        {"links": {}},
        {"links": {**json.loads(laptop().to_json())["links"], "disk_to_cpu": {"bytes_per_s": 0}}},
        {"links": {**json.loads(laptop().to_json())["links"], "disk_to_cpu": {"bytes_per_s": "fast"}}},
        {"layer": {}},
        {"layer": {"768": []}},
        {"layer": {"768": [[1, -5]]}},
        {"layer": {"768": [[1, float("nan")]]}},
        {"device": "tpu"},
        {"memory": {"gpu": 1}},
        {"decode_attention": {"full": {"64": 1}}},
        {"decode_attention": {"full": {"0": 1}, "h2o": {"64": 1}}},
        {"dtype": "int8"},
        {"memory": "much"},
        {"memory": {"gpu": 1, "cpu": 1, "disk": -1}},
        {"layer": {"0": [[1, 5]]}},
        {"layer": {"768": [[0, 5]]}},
        {"step_seconds": float("nan")},
        {"step_seconds": "1"},
        {"logit_seconds": -1},
        {"baseline_bytes": "1"},
        {"machine": []},
        {"device": "cuda"},
        {
            "links": {
                **json.loads(laptop().to_json())["links"],
                "disk_to_cpu": {"bytes_per_s": 1, "slowed_by_compute": 2},
            }
        },
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


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="cannot read the hardware profile"):
        Profile.from_file(tmp_path / "none.json")


tables = st.dictionaries(st.integers(1, 4096), st.floats(1e3, 1e15), min_size=1, max_size=6)


@given(tables, st.integers(1, 10_000))
def test_between_stays_between(table, x):
    value = between(table, x)
    assert min(table.values()) * (1 - 1e-9) <= value <= max(table.values()) * (1 + 1e-9)
    if x in table:
        assert value == pytest.approx(table[x])
