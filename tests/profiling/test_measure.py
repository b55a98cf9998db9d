"""Measuring the machine, in so little time that only benchmarks can judge the rates."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from machines import KERNELS, kernels, laptop

from h2o_flexgen.commands.main import main
from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import GGUF
from h2o_flexgen.kernels import linear
from h2o_flexgen.machine.device import CpuDevice, open_device
from h2o_flexgen.machine.profile import Link, Profile
from h2o_flexgen.profiling import compute, machine
from h2o_flexgen.profiling import measure as hardware
from h2o_flexgen.profiling.compute import Scale
from h2o_flexgen.profiling.machine import crowding, scheduled
from h2o_flexgen.profiling.measure import load_or_measure  # a fixture replaces it in its module
from h2o_flexgen.utils.files import cache_root

ROOT = Path(__file__).resolve().parent.parent.parent


#: small enough for a quick test
TINY = Scale(
    shapes=((64, 64), (256, 64), (1024, 64)),
    rows=(1, 512),
    expert=(64, 64),
    weight_bytes=0,
    prompt=32,
    short=4,
    cold_bytes=1 << 20,
    transfer_bytes=1 << 18,
    file_bytes=1 << 20,
    read_seconds=0.01,
    small_bytes={"disk_to_cpu": 1 << 16, "cpu_to_disk": 1 << 14},
    call_seconds=0.0,
    passes=1,
)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_measured_profile_is_a_profile(tmp_path, dtype):
    profile = hardware.measure(open_device("cpu"), dtype, tmp_path / "offload", False, TINY)
    assert Profile.from_dict(json.loads(profile.to_json())) == profile
    assert profile.memory["gpu"] == profile.memory["cpu"] > 0
    assert profile.machine["cores"] >= 1
    assert list((tmp_path / "offload").iterdir()) == []
    assert profile.kernels == (None if dtype == torch.float32 else KERNELS)
    groups = {kind: profile.matmul.pop(kind) for kind in [*profile.matmul] if kind.endswith("experts")}
    assert groups.keys() == {f"{kind} experts" for kind in profile.matmul if "resident" not in kind}
    assert all(tables.keys() == {(64, 64)} for tables in groups.values())
    for kind, tables in profile.matmul.items():
        rows = {shape: list(rates) for shape, rates in tables.items()}
        both = [1] if kind.startswith("int") else [1, 512]  # every second one
        assert rows == {(64, 64): both, (256, 64): both, (1024, 64): [1]}  # a head takes few rows
    assert profile.decode.keys() == {"int8", "int4", *GGUF} == {"int8", *profile.unpack}


@pytest.mark.parametrize("packed", [False, True])
def test_resident_matrices_are_measured_packed_if_jobs_pack_them(monkeypatch, packed):
    monkeypatch.setattr(compute, "packs", lambda dtype: packed)
    monkeypatch.setattr(compute, "pack", lambda w: w)
    found = compute.matmul_rates(open_device("cpu"), torch.bfloat16, TINY, 0.0)
    assert found.keys() - {"int8", "int8 resident", "int4"} == ({"streamed", "resident"} if packed else {"streamed"})


def test_matrices_too_large_for_memory_are_left_out(monkeypatch):
    monkeypatch.setattr(CpuDevice, "free_bytes", lambda self: 4 * 4 * 256 * 64)
    found = compute.matmul_rates(open_device("cpu"), torch.float32, TINY, 0.0)
    assert list(found["streamed"]) == [(64, 64), (256, 64)]


def test_rates_exclude_the_constant_cost_of_a_matmul(monkeypatch):
    monkeypatch.setattr(compute, "call_seconds", lambda *a: 3e-3)
    found = compute.matmul_rates(open_device("cpu"), torch.float32, TINY, 1e-3)
    assert found["streamed"][256, 64][512] == pytest.approx(2 * 256 * 64 * 512 / 2e-3)


def test_each_rate_is_the_median_of_several_passes():
    links = [Link(1e9, lost) for lost in (1e-10, 3e-10, 2e-10)]
    assert hardware.medians([{"a": {8: n}, "link": link} for n, link in zip((5, 1, 2), links)]) == {
        "a": {8: 2},
        "link": Link(1e9, 2e-10),
    }


@pytest.mark.parametrize("path", sorted((ROOT / "policies" / "hardware").iterdir()), ids=lambda path: path.stem)
def test_shipped_profiles_can_be_read(path):
    Profile.from_file(path)


@pytest.fixture
def quick(monkeypatch):
    """The command measures little."""
    monkeypatch.setattr(hardware, "measure", partial(hardware.measure, progress=False, scale=TINY))


def test_the_command_writes_a_profile(quick, tmp_path):
    out = tmp_path / "profile.json"
    options = ["--device", "cpu", "--dtype", "float32", "--offload-dir", str(tmp_path / "offload")]
    assert main(["hardware", "-o", str(out), *options]) == 0
    assert Profile.from_file(out).dtype == "float32"


def stamp(folder: Path) -> dict:
    """The fields of a profile that identify this machine."""
    return {**hardware.stamp(folder), "dtype": "float32"}


def test_a_machine_is_measured_once_and_again_when_it_changes(monkeypatch, tmp_path):
    made = []

    def measure(device, dtype, root, progress):
        made.append(replace(laptop(), **stamp(root)))
        return made[-1]

    monkeypatch.setattr(hardware, "measure", measure)

    def ask():
        return load_or_measure(open_device("cpu"), torch.float32, tmp_path, False)

    assert ask() == made[0]
    assert ask() == made[0]
    assert len(made) == 1
    monkeypatch.setattr(machine, "FORMAT", 0)
    ask()
    ask()
    assert len(made) == 2
    kept = next((Path(cache_root()) / "hardware").iterdir())
    kept.write_text("{")
    ask()
    assert len(made) == 3


def test_rates_beside_a_busy_program_are_not_kept(monkeypatch, tmp_path):
    found = iter(replace(laptop(), crowded=crowded, **stamp(tmp_path)) for crowded in (0.5, 0.1))
    monkeypatch.setattr(hardware, "measure", lambda *a: next(found))
    asked = [load_or_measure(open_device("cpu"), torch.float32, tmp_path, False) for _ in range(3)]
    assert [profile.crowded for profile in asked] == [0.5, 0.1, 0.1]


def test_a_kept_profile_chooses_the_kernels_it_was_measured_with(monkeypatch, tmp_path):
    measured = replace(laptop(), kernels=kernels(bfloat16="widened"), **(stamp(tmp_path) | {"dtype": "bfloat16"}))
    monkeypatch.setattr(hardware, "measure", lambda *a: measured)
    for _ in range(2):
        linear.use(KERNELS)
        load_or_measure(open_device("cpu"), torch.bfloat16, tmp_path, False)
    assert linear.rates() == measured.kernels


def test_time_spent_waiting_for_a_core_is_counted(tmp_path):
    for n, text in enumerate(["3000000000 1000000000 17", "1000000000 0 1"]):
        (tmp_path / str(n)).mkdir()
        (tmp_path / str(n) / "schedstat").write_text(text + "\n")
    counted = scheduled(tmp_path)
    assert counted == (4.0, 1.0)
    assert scheduled(tmp_path / "none") == (0.0, 0.0)
    for before, share in [((0.0, 0.0), 0.2), ((2.0, 0.0), 1 / 3), (counted, 0.0)]:
        assert crowding(before, counted) == pytest.approx(share)


@pytest.mark.parametrize("share, warnings", [(0.1, 0), (0.5, 1)])
def test_a_busy_machine_is_warned_about(monkeypatch, tmp_path, caplog, share, warnings):
    monkeypatch.setattr(hardware, "crowding", lambda before, now: share)
    profile = hardware.measure(open_device("cpu"), torch.float32, tmp_path / "offload", False, TINY)
    assert profile.crowded == share
    assert caplog.text.count("waiting for a CPU core") == warnings


def test_a_gpu_without_memory_is_an_error_of_one_line(monkeypatch, tmp_path):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    monkeypatch.setattr(hardware, "measure_compute", full)
    with pytest.raises(UserError, match="too little memory left to measure"):
        hardware.measure(open_device("cpu"), torch.float32, tmp_path, False, TINY)


def test_a_folder_that_is_not_writable_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to the offload folder"):
        hardware.measure(open_device("cpu"), torch.float32, tmp_path / "file" / "offload", False, TINY)


def test_errors_of_the_command_are_one_line(quick, tmp_path, capsys):
    assert main(["hardware", "--device", "abacus"]) == 2
    assert "unknown device" in capsys.readouterr().err
    options = ["--device", "cpu", "--dtype", "float32", "--offload-dir", str(tmp_path)]
    assert main(["hardware", "-o", "/nowhere/profile.json", *options]) == 2
    assert "the folder /nowhere does not exist" in capsys.readouterr().err
