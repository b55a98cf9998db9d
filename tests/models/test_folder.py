"""Model folders: several checkpoints, shards, pointers of Git LFS, and damage."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from command_tools import SHORT
from safetensors.torch import load_file, save_file

from h2o_flexgen.errors import UserError
from h2o_flexgen.models.folder import is_whole, weight_files
from h2o_flexgen.models.source import find_model
from h2o_flexgen.storage.checkpoint import Checkpoint

pytest_plugins = ["command_tools"]

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 4242\n"
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


def index(folder: Path, *names, kind: str = "model.safetensors") -> Path:
    path = folder / f"{kind}.index.json"
    path.write_text(json.dumps({"weight_map": {str(n): name for n, name in enumerate(names)}}))
    return path


@pytest.fixture
def folder(tmp_path, model) -> Path:
    return Path(shutil.copytree(model, tmp_path / "folder"))


@pytest.fixture
def sharded(folder) -> Path:
    """A model in two shards without an index."""
    state = load_file(folder / "model.safetensors")
    names = sorted(state)
    for name, part in ((FIRST, names[::2]), (SECOND, names[1::2])):
        save_file({key: state[key] for key in part}, folder / name)
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize(
    "names, taken",
    [
        (["model.safetensors", "pytorch_model.bin", FIRST], ["model.safetensors"]),
        (["pytorch_model.bin", "model.safetensors.index.json"], [FIRST]),
        (["pytorch_model.bin", "pytorch_model.bin.index.json", FIRST], ["pytorch_model.bin"]),
        (["pytorch_model.bin.index.json", FIRST], [FIRST]),
        ([SECOND], [FIRST, SECOND]),
        (["pytorch_model-00002-of-00002.bin"], [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]),
        (["model.fp16.safetensors", "model-1-of-2.safetensors", "adapter_model.safetensors"], []),
    ],
)
def test_of_several_checkpoints_transformers_choice_is_read(tmp_path, names, taken):
    for name in names:
        (tmp_path / name).write_text(json.dumps({"weight_map": {"a": FIRST}}))
    assert [file.name for file in weight_files(tmp_path)] == taken


def test_a_warning_says_which_checkpoint_is_read(folder, caplog):
    index(folder, FIRST)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    (folder / "model.Q4_0.gguf").write_bytes(b"")
    assert Checkpoint(folder).files == [folder / "model.safetensors"]
    others = "model.safetensors.index.json, adapter_model.safetensors, model.Q4_0.gguf"
    assert caplog.messages == [f"{folder} holds several checkpoints: model.safetensors is read, not {others}"]
    caplog.clear()
    for name in ("model.safetensors.index.json", "adapter_model.safetensors", "model.Q4_0.gguf"):
        (folder / name).unlink()
    Checkpoint(folder)
    assert caplog.messages == []


def test_shards_without_an_index_are_all_read(sharded, model):
    assert Checkpoint(sharded).tensors.keys() == Checkpoint(model).tensors.keys() and is_whole(sharded)


def test_shards_without_an_index_must_be_complete(sharded, refused):
    (sharded / FIRST).unlink()
    assert not is_whole(sharded)
    assert f"{FIRST} is missing; download it again" in refused("--model", sharded, *SHORT)
    (sharded / "model-00001-of-00003.safetensors").write_bytes(b"")
    message = f"and no index that says which to read: {FIRST}, model-00001-of-00003"
    assert message in refused("--model", sharded, *SHORT)


@pytest.mark.parametrize(
    "name, message",
    [
        ("../model.safetensors", "names '../model.safetensors': shards are files in its own folder"),
        ("/etc/passwd", "names '/etc/passwd'"),
        ("sub/model.safetensors", "names 'sub/model.safetensors'"),
        ("..", "names '..'"),
        ("", "names ''"),
        (7, "names 7"),
        ("x/" * 1000, "names 'x/x/"),
        ("x" * 300, "is missing; download it again"),
        ("\0", "is missing"),
        ("\ud800", "is missing"),
        ("folder", "regular file"),
        ("pipe", "regular file"),
    ],
)
def test_names_in_an_index(folder, refused, name, message):
    (folder / "model.safetensors").unlink()
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    index(folder, name)
    found = refused("--model", folder, *SHORT)
    assert message in found and len(found) < 800


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer.model"])
def test_a_pointer_of_git_lfs(folder, refused, name):
    (folder / name).write_text(POINTER)
    message = f"{folder / name} is a pointer of Git LFS, not the file itself: run git lfs pull in its folder"
    assert message in refused("--model", folder, *SHORT)


@pytest.mark.parametrize(
    "names, message",
    [
        (["adapter_model.safetensors", "adapter_config.json"], "it holds an adapter: merge it into its base model"),
        (["consolidated.safetensors", "params.json"], "consolidated.safetensors is in the format of its publisher"),
        (["model.fp16.safetensors", "flax_model.msgpack"], "holds flax_model.msgpack, model.fp16.safetensors, which"),
    ],
)
@pytest.mark.parametrize("has_config", [False, True])
def test_a_folder_of_other_weights(folder, refused, names, message, has_config):
    (folder / "model.safetensors").unlink()
    if not has_config:
        (folder / "config.json").unlink()
    for name in names:
        (folder / name).write_text("{}")
    assert message in refused("--model", folder, *SHORT)


def test_a_folder_that_may_not_be_listed_or_entered(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda path, mode: False)
        with pytest.raises(UserError, match=f"cannot open files in the folder {folder}: Permission denied"):
            find_model(str(folder))

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("os.listdir", refuse)
        with pytest.raises(UserError, match=f"cannot list the folder {folder}: Permission denied"):
            find_model(str(folder))
        with pytest.raises(UserError, match="no such folder or GGUF file$"):
            find_model(str(folder.parent / "none"))
