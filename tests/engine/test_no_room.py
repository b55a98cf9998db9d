"""A job whose memory or disk is too small, or fails, ends with a one-line error and leaves nothing behind."""

from __future__ import annotations

import errno
import os

import pytest
from command_tools import ON_CPU, ON_DISK, ON_GPU, SHORT, percent

pytest_plugins = ["command_tools"]


@pytest.mark.parametrize(
    "where, cap, tier, advice",
    [
        (ON_GPU, ("--mem", "0.0001"), "RAM", "--gpu-batch-size"),
        (ON_GPU, ("--gpu-mem", "0.0001"), "RAM", "--gpu-batch-size"),
        (ON_CPU, ("--cpu-mem", "0.00001"), "cpu tier", "batch sizes"),
        (ON_DISK, ("--disk-mem", "0.00001"), "disk tier", "--offload-dir"),
    ],
    ids=["mem", "gpu", "cpu", "disk"],
)
def test_a_plan_that_does_not_fit_a_tier(refused, model, where, cap, tier, advice):
    job = ("--prompt-len", "40", "--gen-len", "8", "--gpu-batch-size", "8")
    message = refused("--model", model, *job, *percent(where), *cap)
    assert tier in message and advice in message
    assert f"({int(float(cap[1]) * (1 << 30))} bytes)" in message
    needed = int(message.split("(")[1].split(" bytes")[0])
    assert where != ON_GPU or needed > 128_000  # the weights alone


def test_nothing_fits_at_all(refused, model):
    assert "RAM is too small" in refused("--model", model, *SHORT, "--gpu-mem", "0.0001", "--disk-mem", "0.00001")


def test_a_plan_that_does_not_fit_the_ram(refused, model, monkeypatch):
    from h2o_flexgen.machine import memory

    monkeypatch.setattr(memory, "ram_in_all", lambda: 2 << 20)
    job = ("--prompt-len", "60", "--gen-len", "2", "--gpu-batch-size", "512")
    message = refused("--model", model, *job, *percent(ON_GPU))
    assert "RAM" in message and "bytes" in message


def test_no_space_when_the_files_are_made(refused, model, monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    message = refused("--model", model, *SHORT, *percent(ON_DISK), early=False)
    assert "No space left" in message and "--offload-dir" in message


@pytest.mark.parametrize(
    "what, after, overlap",
    [
        (("100", "0", "0", "0", "100", "0"), 20, "--overlap"),
        (("100", "0", "100", "0", "0", "0"), 7, "--no-overlap"),  # activations are written in prefill only
        (ON_DISK, 0, "--overlap"),
        (ON_DISK, 3, "--no-overlap"),
    ],
)
def test_no_space_during_the_run(refused, model, monkeypatch, what, after, overlap):
    calls = iter(range(10**9))
    real = os.pwrite

    def full(fd, data, offset):
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    options = ("--prompt-len", "6", "--gen-len", "12", "--gpu-batch-size", "1", "--num-gpu-batches", "2")
    message = refused("--model", model, *options, "--ignore-eos", *percent(what), overlap, early=False)
    assert "No space left" in message and "--offload-dir" in message
    assert next(calls) > after


@pytest.mark.parametrize("after, overlap", [(0, "--overlap"), (30, "--no-overlap")])
def test_a_disk_that_stops_reading(refused, model, monkeypatch, overlap, after):
    calls = iter(range(10**9))
    real = os.preadv

    def failing(fd, buffers, offset):
        if next(calls) >= after:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    message = refused("--model", model, *SHORT, *percent(ON_DISK), overlap, early=False)
    assert "cannot read" in message and "Input/output error" in message


def test_a_dummy_model_with_no_space_for_its_weights(refused, model, monkeypatch):
    def full(fd, data, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    message = refused("--model", model, "--path", "_DUMMY_", *SHORT, *percent(ON_DISK), early=False)
    assert "No space left" in message


@pytest.mark.parametrize("where", ["file", "file/below", "x" * 300])
def test_an_offload_folder_that_cannot_be_made(refused, model, tmp_path, where):
    (tmp_path / "file").write_text("a file")
    message = refused("--model", model, *SHORT, *percent(ON_DISK), "--offload-dir", tmp_path / where, early=False)
    assert "offload folder" in message and "--offload-dir" in message


def test_a_read_only_offload_folder(refused, model, read_only):
    for where in (read_only, read_only / "below"):
        message = refused("--model", model, *SHORT, *percent(ON_DISK), "--offload-dir", where, early=False)
        assert "Read-only file system" in message and "--offload-dir" in message


def test_a_small_disk(refused, model, small_disk, monkeypatch):
    """A real file system of 2 MiB: the plan sees that it is too small, and without the plan the kernel does."""
    job = ("--model", model, "--prompt-len", "40", "--gen-len", "8", "--gpu-batch-size", "256", *percent(ON_DISK))
    message = refused(*job, "--offload-dir", small_disk)
    assert "disk tier" in message
    monkeypatch.setattr("h2o_flexgen.machine.memory.disk_free", lambda folder: 1 << 40)
    message = refused(*job, "--offload-dir", small_disk, early=False)
    assert "No space left" in message
    assert list(small_disk.iterdir()) == []


def test_a_small_disk_that_holds_the_job(cli, model, small_disk):
    job = ("--model", model, *SHORT, *percent(ON_DISK), "--offload-dir", small_disk)
    code, _, err = cli(*job)
    assert code == 0, err
    assert list(small_disk.iterdir()) == []
