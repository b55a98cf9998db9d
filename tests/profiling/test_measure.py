"""Measuring the machine: small enough here to be quick; that the numbers are right is for the benchmarks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from machines import laptop

from h2o_flexgen import hardware as command
from h2o_flexgen.errors import UserError
from h2o_flexgen.offload.device import Device
from h2o_flexgen.planning.profile import Profile
from h2o_flexgen.profiling import measure as hardware

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(hardware, "HIDDEN", {"cpu": (128,)})
    monkeypatch.setattr(hardware, "TOKENS", (1, 512))
    monkeypatch.setattr(hardware, "HEAD_TOKENS", 1)
    monkeypatch.setattr(hardware, "PROMPT", 32)
    monkeypatch.setattr(hardware, "FILE", 1 << 20)
    monkeypatch.setattr(hardware, "TRANSFER", 1 << 18)
    monkeypatch.setattr(hardware, "SHORT", 4)
    monkeypatch.setattr(hardware, "SMALL", {"disk_to_cpu": 1 << 16, "cpu_to_disk": 1 << 14})
    monkeypatch.setattr(hardware, "PASSES", 1)
    seconds = hardware._seconds
    monkeypatch.setattr(hardware, "_seconds", lambda device, work, cold: seconds(device, work, 0.0, cold))


def test_a_measured_profile_is_a_profile(quick, tmp_path):
    profile = hardware.measure(Device("cpu"), torch.float32, tmp_path / "offload", progress=False)
    assert Profile.from_dict(json.loads(profile.to_json())) == profile
    assert profile.memory["gpu"] == profile.memory["cpu"] > 0
    assert profile.machine["cores"] >= 1
    assert list((tmp_path / "offload").iterdir()) == []


@pytest.mark.parametrize("path", sorted((ROOT / "policies" / "hardware").iterdir()), ids=lambda path: path.stem)
def test_kept_profiles_can_be_read(path):
    Profile.from_file(path)


def test_the_command_writes_a_profile(quick, tmp_path):
    out = tmp_path / "profile.json"
    options = ["--device", "cpu", "--dtype", "float32", "--offload-dir", str(tmp_path / "offload")]
    assert command.main(["-o", str(out), *options]) == 0
    assert Profile.from_file(out).dtype == "float32"


@pytest.fixture
def one_size(monkeypatch):
    """The layers that `laptop` knows."""
    monkeypatch.setattr(hardware, "HIDDEN", {"cpu": tuple(laptop().layer)})


def test_a_machine_is_measured_once_and_again_when_it_changes(one_size, monkeypatch, tmp_path):
    made = []

    def measure(device, dtype, root, progress):
        made.append(replace(laptop(), machine=hardware.machine(root), versions=hardware.versions(), dtype="float32"))
        return made[-1]

    monkeypatch.setattr(hardware, "measure", measure)

    def ask():
        return hardware.load_or_measure(Device("cpu"), torch.float32, tmp_path, progress=False)

    assert ask() == made[0]
    assert ask() == made[0]
    assert len(made) == 1
    monkeypatch.setattr(hardware, "versions", lambda: {"torch": "another"})
    ask()
    ask()
    assert len(made) == 2
    kept = next((Path(hardware.cache_root()) / "hardware").iterdir())
    kept.write_text("{")
    ask()
    assert len(made) == 3


def test_what_there_was_no_memory_to_measure_is_measured_when_there_is(monkeypatch, tmp_path):
    now = dict(machine=hardware.machine(tmp_path), versions=hardware.versions(), dtype="float32")
    monkeypatch.setattr(hardware, "HIDDEN", {"cpu": (64, 2048)})
    free, made = [1 << 20], []
    monkeypatch.setattr(Device, "free_bytes", lambda self: free[0])

    def measure(device, dtype, root, progress):
        table = laptop().layer[2048]
        made.append(replace(laptop(), layer={n: table for n in hardware._sizes(device, dtype)}, **now))
        return made[-1]

    monkeypatch.setattr(hardware, "measure", measure)
    for free[0], measured in ((1 << 20, 1), (1 << 20, 1), (1 << 40, 2), (1 << 40, 2), (1 << 20, 2)):
        profile = hardware.load_or_measure(Device("cpu"), torch.float32, tmp_path, progress=False)
        assert profile == made[-1] and len(made) == measured
    assert [list(profile.layer) for profile in made] == [[64], [64, 2048]]


def test_rates_beside_a_busy_program_are_not_kept(one_size, monkeypatch, tmp_path):
    now = dict(machine=hardware.machine(tmp_path), versions=hardware.versions(), dtype="float32")
    found = iter(replace(laptop(), crowded=crowded, **now) for crowded in (0.5, 0.1))
    monkeypatch.setattr(hardware, "measure", lambda *a: next(found))
    asked = [hardware.load_or_measure(Device("cpu"), torch.float32, tmp_path, progress=False) for _ in range(3)]
    assert [profile.crowded for profile in asked] == [0.5, 0.1, 0.1]


def test_waiting_for_a_processor_is_counted_and_told(quick, monkeypatch, tmp_path, capsys):
    for n, text in enumerate(["3000000000 1000000000 17", "1000000000 0 1"]):
        (tmp_path / str(n)).mkdir()
        (tmp_path / str(n) / "schedstat").write_text(text + "\n")
    counted = hardware.scheduled(tmp_path)
    assert counted == (4.0, 1.0)
    assert hardware.scheduled(tmp_path / "none") == (0.0, 0.0)
    for before, crowded, said in [((0.0, 0.0), 0.2, 0), ((2.0, 0.0), 1 / 3, 1), (counted, 0.0, 0)]:
        answers = iter([before, counted])
        monkeypatch.setattr(hardware, "scheduled", answers.__next__)
        profile = hardware.measure(Device("cpu"), torch.float32, tmp_path / "offload", progress=False)
        assert profile.crowded == pytest.approx(crowded)
        assert capsys.readouterr().err.count("waiting for a processor") == said


def test_a_card_without_memory_is_an_error_of_one_line(monkeypatch, tmp_path):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    monkeypatch.setattr(hardware, "_measure", full)
    with pytest.raises(UserError, match="too little memory left to measure"):
        hardware.measure(Device("cpu"), torch.float32, tmp_path)
    monkeypatch.setattr(Device, "load_libraries", full)
    with pytest.raises(UserError, match="no memory left to begin with"):
        Device("cpu").start(None)


def test_a_folder_that_cannot_be_written(quick, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to the offload folder"):
        hardware.measure(Device("cpu"), torch.float32, tmp_path / "file" / "offload", progress=False)


def test_errors_of_the_command_are_one_line(quick, tmp_path, capsys):
    assert command.main(["--device", "abacus"]) == 2
    assert "unknown device" in capsys.readouterr().err
    options = ["--device", "cpu", "--dtype", "float32", "--offload-dir", str(tmp_path)]
    assert command.main(["-o", "/nowhere/profile.json", *options]) == 2
    assert "the folder /nowhere does not exist" in capsys.readouterr().err
