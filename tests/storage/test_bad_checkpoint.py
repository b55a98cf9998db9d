"""Weights that are missing, cut short, garbage or not finite are an error of one line that names the file or tensor."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from command_tools import FP32, ON_CPU, ON_DISK, ON_GPU, SHORT, cut, percent, tiny_state, to_bin, write_model

from h2o_flexgen.storage.checkpoint import Checkpoint

pytest_plugins = ["command_tools"]


def test_no_weights(refused, broken):
    (broken / "model.safetensors").unlink()
    assert "no weights" in refused("--model", broken, *SHORT)


@pytest.mark.parametrize("keep", [0, 0.0001, 0.01, 0.5, 0.999])
def test_a_file_that_is_cut_short(refused, broken, keep):
    cut(broken / "model.safetensors", keep)
    message = refused("--model", broken, *SHORT)
    assert "model.safetensors" in message and "download it again" in message


def test_a_shard_that_is_cut_short(refused, sharded):
    folder, shards = sharded
    cut(shards[0], 0.9)
    message = refused("--model", folder, *SHORT)
    assert shards[0].name in message and "cut short" in message


def write_header(path: Path, header: bytes, data: bytes = b"\0" * 64) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def entry(**changes) -> bytes:
    return json.dumps({"t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes}).encode()


@pytest.mark.parametrize(
    "header",
    [
        b"garbage!",
        b"\xff\xfe\xfd\xfc",
        b"[]",
        b"null",
        b'{"t": []}',
        b'{"t": {"dtype": "F32"}}',
        b"[" * 100_000,
        entry(data_offsets=[0, "x"]),
        entry(data_offsets=[0]),
        entry(data_offsets=[16, 0]),
        entry(data_offsets=[0, 15]),
        entry(data_offsets=[0.0, 16.0]),
        entry(shape=[8]),
        entry(shape=[-4]),
        entry(shape=4),
        entry(dtype=["F32"]),
    ],
)
def test_a_garbage_header(refused, broken, header):
    write_header(broken / "model.safetensors", header)
    message = refused("--model", broken, *SHORT)
    assert "model.safetensors" in message and "download it again" in message


def test_a_header_longer_than_the_file(refused, broken):
    (broken / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    assert "model.safetensors" in refused("--model", broken, *SHORT)


@pytest.mark.parametrize(
    "tensor, words",
    [
        (None, ["no tensor"]),
        (torch.zeros(32, 64), ["[32, 64]", "[64, 32]"]),
        (torch.zeros(64, 32, dtype=torch.int8), ["I8"]),
    ],
    ids=["missing", "shape", "type"],
)
def test_a_tensor_of_another_kind(refused, tmp_path, tensor, words):
    state = tiny_state()
    name = "model.decoder.layers.1.fc1.weight"
    del state[name]
    folder = write_model(tmp_path / "m", state | ({} if tensor is None else {name: tensor}))
    message = refused("--model", folder, *SHORT)
    assert all(word in message for word in (name.removeprefix("model."), *words))


@pytest.mark.parametrize(
    "placement, number", [(ON_GPU, torch.nan), (ON_CPU, torch.inf), (ON_DISK, torch.nan)], ids=["gpu", "cpu", "disk"]
)
def test_weights_that_are_not_finite(refused, tmp_path, placement, number):
    state = tiny_state()
    state["model.decoder.layers.1.self_attn.v_proj.weight"][3, 5] = number
    folder = write_model(tmp_path / "nan", state)
    message = refused("--model", folder, *percent(placement), *FP32, *SHORT, early=False)
    assert "decoder.layers.1.self_attn.v_proj.weight" in message and "NaN" in message


@pytest.mark.parametrize("name", ["embed_tokens", "embed_positions"])
def test_an_embedding_on_disk_that_is_not_finite(refused, tmp_path, name):
    state = tiny_state()
    state[f"model.decoder.{name}.weight"][:] = float("nan")
    folder = write_model(tmp_path / "nan", state)
    message = refused("--model", folder, *percent(ON_DISK), *FP32, *SHORT, early=False)
    assert name in message


@pytest.mark.parametrize("keep", [0, 0.01, 0.5, 0.99])
def test_a_bin_that_is_cut_short(refused, broken, tmp_path, keep):
    cut(to_bin(broken), keep)
    message = refused("--model", broken, *SHORT, early=False)
    assert "pytorch_model.bin" in message and "Download it again" in message
    assert list((tmp_path / "placement" / "converted").glob("*/")) == []


@pytest.mark.parametrize("content", [b"garbage", b"\x80\x04garbage", b"PK\x03\x04 no zip"])
def test_a_garbage_bin(refused, broken, tmp_path, content):
    to_bin(broken).write_bytes(content)
    assert "pytorch_model.bin" in refused("--model", broken, *SHORT, early=False)
    assert list((tmp_path / "placement" / "converted").glob("*/")) == []


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("old_format", [False, True], ids=["zip", "legacy"])
def test_code_in_a_bin_does_not_run(refused, broken, tmp_path, old_format):
    path = to_bin(broken)
    proof = tmp_path / "proof"
    state = tiny_state() | {"payload": Payload(proof)}
    torch.save(state, path, _use_new_zipfile_serialization=not old_format)
    assert "pytorch_model.bin" in refused("--model", broken, *SHORT, early=False)
    assert not proof.exists()


@pytest.mark.parametrize("content", [[torch.zeros(2)], {"model": {"w": torch.zeros(2)}}, {1: torch.zeros(2)}, 5])
def test_a_bin_that_holds_no_tensors(refused, broken, content):
    torch.save(content, to_bin(broken))
    assert "pytorch_model.bin does not hold a dict of tensors" in refused("--model", broken, *SHORT, early=False)


def test_no_space_to_convert_a_bin(refused, broken, tmp_path, monkeypatch):
    import safetensors.torch

    def full(*args, **kwargs):
        safetensors.torch.serialize_file({}, "/dev/full/no", None)  # what safetensors raises when it cannot write

    to_bin(broken)
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    assert "convert" in refused("--model", broken, *SHORT, early=False)
    assert list((tmp_path / "placement" / "converted").glob("*/")) == []


def test_nowhere_to_convert_a_bin(refused, broken, tmp_path, monkeypatch):
    to_bin(broken)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("H2O_FLEXGEN_HOME", str(tmp_path / "file" / "placement"))
    assert "convert" in refused("--model", broken, *SHORT)


def test_a_checkpoint_that_shrinks_while_the_job_runs(refused, broken, monkeypatch):
    """The file is complete when it is checked, and cut short when the weights are read."""
    real = Checkpoint.check

    def check(self, needed):
        real(self, needed)
        cut(broken / "model.safetensors", 0.2)

    monkeypatch.setattr(Checkpoint, "check", check)
    for placement in (ON_GPU, ON_DISK):
        message = refused("--model", broken, *SHORT, *percent(placement), early=False)
        assert "cut short" in message
        write_model(broken)
