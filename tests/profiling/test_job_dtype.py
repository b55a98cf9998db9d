"""The kernels of a machine are measured once, and decide the dtype of a job."""

from __future__ import annotations

import json

import pytest
import torch
from machines import kernels, laptop

from h2o_flexgen.errors import UserError
from h2o_flexgen.kernels import linear
from h2o_flexgen.kernels.rates import ROWS
from h2o_flexgen.machine.device import CudaDevice, open_device
from h2o_flexgen.profiling import machine, measure

CPU = open_device("cpu")


@pytest.fixture
def measured(monkeypatch):
    """Replaces measuring, and lists the rates that it has returned."""
    found = []

    def rates():
        found.append(kernels(**{"bfloat16": ("native", "widened")[len(found) % 2]}))
        return found[-1]

    monkeypatch.setattr(linear, "measure", rates)
    monkeypatch.setattr(measure, "crowding", lambda before, now: 0.0)
    linear.use(None)
    return found


def test_rates_are_measured_once_and_again_when_the_machine_changes(measured, monkeypatch):
    assert measure.load_or_measure_kernels() == measured[0]
    assert measure.load_or_measure_kernels() == measured[0]
    monkeypatch.setattr(machine, "FORMAT", 0)
    assert measure.load_or_measure_kernels() == measured[1]
    assert len(measured) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"rates": 3}'])
def test_a_damaged_file_is_measured_again(measured, text):
    measure.load_or_measure_kernels()
    machine.kept_file("kernels").write_text(text)
    assert measure.load_or_measure_kernels() == measured[1]
    assert json.loads(machine.kept_file("kernels").read_text())["machine"] == machine.machine()


def test_rates_beside_a_busy_program_are_not_kept(measured, monkeypatch):
    monkeypatch.setattr(measure, "crowding", lambda before, now: 0.5)
    measure.load_or_measure_kernels()
    assert not machine.kept_file("kernels").exists()


def test_a_folder_that_is_not_writable_only_warns(measured, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("H2O_FLEXGEN_HOME", str(tmp_path / "file"))
    assert measure.load_or_measure_kernels() == measured[0]
    assert "cannot keep what was measured" in caplog.text


def test_auto_is_the_fastest_measured_type(measured):
    assert measure.job_dtype(CPU, "auto") == torch.bfloat16
    assert measure.job_dtype(CPU, "auto") == torch.bfloat16
    assert len(measured) == 1


@pytest.mark.parametrize("name", ["float32", "fp32"])
def test_fp32_needs_no_measuring(measured, name):
    assert measure.job_dtype(CPU, name) == torch.float32
    assert measured == []


def test_a_given_profile_makes_measuring_unnecessary(measured):
    profile = laptop(dtype="float16", kernels=kernels(float16="native"))
    assert measure.job_dtype(CPU, "auto", profile=profile) == torch.float16
    assert measured == []


def test_the_stored_type_wins_a_tie(measured):
    linear.use(kernels(bfloat16="native", float16="native"))
    assert measure.job_dtype(CPU, "auto", "float16") == torch.float16
    assert measure.job_dtype(CPU, "auto", "bfloat16") == torch.bfloat16


@pytest.mark.parametrize("rate, warns", [(1e11, True), (2e11, True), (4e11, False)])
def test_a_warning_if_int8_gains_nothing(measured, caplog, rate, warns):
    rates = kernels(bfloat16="native")
    rates.linear["int8"] = {"native": dict.fromkeys(ROWS, rate)}
    linear.use(rates)
    assert measure.job_dtype(CPU, "auto", compute="int8") == torch.bfloat16
    assert ("no faster than in bfloat16: leave out `compute` int8" in caplog.text) == warns


@pytest.mark.parametrize(
    "capability, stored, wanted",
    [
        ((7, 5), "bfloat16", torch.float16),
        ((8, 0), "bfloat16", torch.bfloat16),
        ((8, 0), "float16", torch.float16),
        ((8, 0), None, torch.float16),
    ],
)
def test_auto_on_cuda_is_fp16_except_for_checkpoints_in_bf16(measured, monkeypatch, capability, stored, wanted):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert measure.job_dtype(CudaDevice(torch.device("cuda")), "auto", stored) == wanted
    assert measured == []


def test_an_unknown_type_is_an_error():
    with pytest.raises(UserError, match="unknown dtype"):
        measure.job_dtype(CPU, "float8")
