"""Files that a user names: endless ones are not waited for, and absurdly large ones are not read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command_tools import SHORT, tiny_state, write_model

from h2o_flexgen.commands.main import main
from h2o_flexgen.errors import UserError
from h2o_flexgen.models.registry import TOKENIZER_FILES
from h2o_flexgen.utils import files
from h2o_flexgen.utils.files import JSON_BYTES, check_small, open_regular, read_json, read_text, write_text

pytest_plugins = ["command_tools"]


def put(kind: str, path: Path) -> None:
    """Replace a file by a pipe that nobody writes to, a device or a folder."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")


KINDS = {"pipe": "it is not a regular file", "device": "it is not a regular file", "folder": "Is a directory"}
each_kind = pytest.mark.parametrize("kind", KINDS)
endless = pytest.mark.parametrize("kind", ["pipe", "device"])


@each_kind
def test_only_regular_files_are_opened(tmp_path, kind):
    put(kind, tmp_path / "file")
    before = len(os.listdir("/proc/self/fd"))
    for read in (read_json, read_text):
        with pytest.raises(UserError, match=f"^cannot read the file.*: {KINDS[kind]}$"):
            read("the file", tmp_path / "file")
    with pytest.raises(UserError, match=f"^cannot read the file .*: {KINDS[kind]}$"):
        check_small("the file", tmp_path / "file")
    assert len(os.listdir("/proc/self/fd")) == before


def test_links_are_followed_only_if_allowed(tmp_path):
    (tmp_path / "file").write_text("[1]")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_json("the file", tmp_path / "link") == [1]
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_TRUNC):
        with pytest.raises(OSError, match="it is a link"):
            open_regular(tmp_path / "link", flags | os.O_NOFOLLOW)
    assert (tmp_path / "file").read_text() == "[1]"


def test_a_huge_file_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, JSON_BYTES + 1)
    for read in (read_json, check_small):
        with pytest.raises(UserError, match="it is larger than 100 MiB"):
            read("the file", path)
    monkeypatch.setattr(files, "TEXT_BYTES", 1 << 20)
    with pytest.raises(UserError, match="it is larger than 1 MiB"):
        read_text("the file", path)


def test_a_report_is_written_to_a_pipe_only_if_it_has_a_reader(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="cannot write --report .*: No such device"):
        write_text("--report", str(tmp_path / "pipe"), "text")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text("--report", str(tmp_path / "pipe"), "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)


@endless
@pytest.mark.parametrize(
    "called, argv",
    [
        ("the policy", ["generate", "--policy", "FILE"]),
        ("--quality", ["plan", "--max-loss", "0.1", "--quality", "FILE"]),
        ("--kv-rule", ["plan", "--hh-size", "2", "--kv-rule", "h2o:layers=FILE"]),
        ("the hardware profile", ["search", "--hardware", "FILE"]),
    ],
)
def test_an_option_that_names_an_endless_file(model, tmp_path, capfd, called, argv, kind):
    file = tmp_path / "file"
    put(kind, file)
    words = [word.replace("FILE", str(file)) for word in argv]
    assert main([*words, "--model", str(model), *SHORT]) == 2
    assert capfd.readouterr().err == f"error: cannot read {called} {file}: it is not a regular file\n"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", *TOKENIZER_FILES])
def test_an_endless_file_in_a_model_folder(refused, broken, name):
    put("pipe", broken / name)
    message = refused("--model", broken, *SHORT, early=False)
    assert name in message and "regular file" in message or "no weights in" in message


@pytest.mark.parametrize("name, kind", [("pytorch_model.bin", "pipe"), ("model.gguf", "device")])
def test_endless_weights_in_another_format(refused, broken, name, kind):
    (broken / "model.safetensors").unlink()
    put(kind, broken / name)
    assert str(broken) in refused("--model", broken, *SHORT, early=False)


def test_a_huge_tokenizer_is_not_read(refused, tmp_path):
    folder = write_model(tmp_path / "model", tiny_state())
    (folder / "tokenizer.json").touch()
    os.truncate(folder / "tokenizer.json", JSON_BYTES + 1)
    assert "tokenizer.json: it is larger than 100 MiB" in refused("--model", folder, *SHORT)
