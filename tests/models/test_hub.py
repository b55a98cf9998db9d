"""Models on the Hugging Face hub, simulated by a local server: what is fetched, and the messages where it fails."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from command_tools import CHAT_TEMPLATE, SHORT, TINY, read_rows, write_prompts
from hub_server import COMMIT, Hub

from h2o_flexgen.commands.main import main
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.settings import changes
from h2o_flexgen.models import hub as hub_module
from h2o_flexgen.models import source
from h2o_flexgen.models.repository import Repository, repository, with_revision

pytest_plugins = ["command_tools"]
NAME = "someone/tiny-opt"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Hub:
    """An empty hub that is reachable, and an empty cache."""
    from huggingface_hub import constants

    with Hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield server


@pytest.fixture
def offline(monkeypatch):
    from huggingface_hub import constants

    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def forget_listing(folder: Path) -> None:
    """As if an older version of the hub's client had downloaded it."""
    shutil.rmtree(folder.parents[1] / "trees", ignore_errors=True)
    with suppress(ImportError):
        from huggingface_hub import _tree_cache

        _tree_cache._IN_MEMORY_TREE_CACHE.clear()


def message_of(name: str, weights: bool = True) -> str:
    with pytest.raises(UserError) as caught:
        source.find_model(name, weights=weights)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# what is fetched


def test_a_job_runs_a_model_of_the_hub_and_reports_its_revision(hub, cli, model, tmp_path, offline):
    hub.repositories[NAME] = files_of(model) | {"onnx/model.onnx": b"no", "model.msgpack": b"no"}
    out = tmp_path / "out.jsonl"
    report = tmp_path / "report.json"
    files = ("--input-file", write_prompts(tmp_path / "in.jsonl"), "--output-file", out, "--report", report)
    code, told, err = cli("--model", NAME, "--revision", "v1.0", "--gen-len", 2, *files)
    assert code == 0, err
    assert hub.files_asked() == ["config.json", "model.safetensors"]
    assert json.loads(report.read_text())["model_revision"] == COMMIT
    assert f"(revision {COMMIT[:12]})" in told
    assert json.loads(Path(f"{out}.manifest.json").read_text())["settings"]["model_revision"] == COMMIT
    first = read_rows(out)
    hub.asked.clear()
    offline()
    out.unlink()
    assert cli("--model", f"{NAME}@v1.0", "--gen-len", 2, "--restart", *files)[0] == 0
    assert [row["token_ids"] for row in read_rows(out)] == [row["token_ids"] for row in first]
    assert hub.asked == []


def test_a_plan_fetches_only_the_config_and_reports_the_revision(hub, model, capsys):
    hub.repositories[NAME] = files_of(model)
    options = ("--prompt-len", "6", "--gen-len", "3", "--num-prompts", "2", "--json")
    assert main(["plan", f"https://huggingface.co/{NAME}/tree/v1.0", *options]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["revision"] == COMMIT
    assert hub.files_asked() == ["config.json"]


def test_a_config_that_cannot_be_run_is_found_before_the_weights(hub, model):
    config = TINY | {"model_type": "mamba"}
    hub.repositories[NAME] = files_of(model) | {"config.json": json.dumps(config).encode()}
    assert "'mamba' is not supported" in message_of(NAME)
    assert hub.files_asked() == ["config.json"]


def test_templates_in_files_of_their_own_are_fetched(hub, talker):
    more = {"additional_chat_templates/tools.jinja": b"{{ tools }}"}
    hub.repositories[NAME] = files_of(talker) | more
    folder, _ = source.find_model(NAME)
    assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert (folder / "additional_chat_templates" / "tools.jinja").exists()


@pytest.fixture(params=[True, False], ids=["listed", "unlisted"])
def without_template(request, hub, talker):
    """(a cached model that lacks its template, whether the cache lists the repository's files)."""
    hub.repositories[NAME] = files_of(talker)
    folder, _ = source.find_model(NAME)
    (folder / "chat_template.jinja").unlink()
    if not request.param:
        forget_listing(folder)
    return folder, request.param


def test_offline_a_cached_model_runs_without_its_template(without_template, offline, caplog):
    folder, has_listing = without_template
    offline()
    assert source.find_model(NAME)[0] == folder
    assert ("lacks chat_template.jinja; HF_HUB_OFFLINE is set" in caplog.text) == has_listing


def test_a_missing_template_is_fetched_once(hub, without_template):
    folder, _ = without_template
    source.find_model(NAME)
    assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    hub.asked.clear()
    source.find_model(NAME)
    assert hub.asked == []


def test_the_hub_is_asked_only_once_whether_there_is_a_template(hub, texts):
    hub.repositories[NAME] = files_of(texts)
    folder, _ = source.find_model(NAME)
    forget_listing(folder)
    hub.asked.clear()
    source.find_model(NAME)
    assert hub.asked == [("HEAD", f"{NAME}/resolve/{COMMIT}/chat_template.jinja")]
    hub.asked.clear()
    source.find_model(NAME)
    assert hub.asked == []


def test_an_interrupted_download_is_resumed(hub, sharded):
    folder, shards = sharded
    hub.repositories[NAME] = files_of(folder)
    source.find_model(NAME, weights=False)
    hub.repositories[NAME].pop(shards[1].name)  # as if the connection were lost between the two
    assert f"lacks {shards[1].name}; the repository lacks a file that it lists" in message_of(NAME)
    hub.repositories[NAME][shards[1].name] = shards[1].read_bytes()
    hub.asked.clear()
    found, _ = source.find_model(NAME)
    assert {shard.name for shard in shards} <= {file.name for file in found.iterdir()}
    assert hub.files_asked() == [shards[1].name]


@pytest.mark.parametrize("missing", ["config.json", "a link to config.json", "model-00001-of-00002.safetensors"])
def test_offline_with_an_incomplete_snapshot_the_cache_is_blamed(hub, sharded, offline, missing):
    """Links lead nowhere when blobs were deleted to make room."""
    hub.repositories[NAME] = files_of(sharded[0])
    file = source.find_model(NAME)[0] / missing.rpartition(" ")[2]
    file.unlink()
    if "link" in missing:
        file.symlink_to("../../blobs/gone")
    offline()
    assert f"the local cache lacks {file.name}; HF_HUB_OFFLINE is set" in message_of(NAME)


def test_a_damaged_cache_is_not_trusted(hub, model, tmp_path):
    hub.repositories[NAME] = files_of(model)
    folder, _ = source.find_model(NAME)
    (folder.parents[1] / "refs" / "main").write_bytes(b"\xff\xfe")
    (folder.parents[1] / "trees" / f"{COMMIT}.json").write_text('{"files": 3}')
    assert source.find_model(f"{NAME}@{COMMIT}")[0] == folder
    assert hub_module.downloaded(repository(NAME)) is None


# GGUF files

FILES = (
    "m-Q4_K_M.gguf",
    "m-q8_0.gguf",
    "big/m-F16-00001-of-00002.gguf",
    "big/m-F16-00002-of-00002.gguf",
    "mmproj-F16.gguf",
)


@pytest.mark.parametrize(
    "name, fetched",
    [
        ("someone/m-GGUF:Q4_K_M", FILES[:1]),
        ("someone/m-GGUF:q4_k_m", FILES[:1]),
        ("someone/m-GGUF/m-Q4_K_M.gguf@v1.0", FILES[:1]),
        ("hf.co/someone/m-GGUF:Q8_0", FILES[1:2]),
        ("someone/m-GGUF:F16", FILES[2:4]),
        ("someone/m-GGUF/big/m-F16-00002-of-00002.gguf", FILES[2:4]),
        ("https://huggingface.co/someone/m-GGUF/blob/main/m-q8_0.gguf?download=true", FILES[1:2]),
    ],
)
def test_a_gguf_file_of_the_hub(hub, name, fetched, offline):
    hub.repositories["someone/m-GGUF"] = {file: file.encode() for file in FILES}
    found = hub_module.snapshot(repository(name), weights=True)
    assert found.read_text() == fetched[0]
    assert sorted(hub.files_asked()) == sorted(Path(file).name for file in fetched)
    offline()
    assert hub_module.snapshot(repository(name), weights=True) == found
    assert hub_module.commit(found) == COMMIT


def test_the_missing_part_of_a_split_file_is_fetched(hub):
    hub.repositories["someone/m-GGUF"] = {file: file.encode() for file in FILES}
    found = hub_module.snapshot(repository("someone/m-GGUF:F16"), weights=True)
    (found.parent / Path(FILES[3]).name).unlink()
    assert hub_module.snapshot(repository("someone/m-GGUF:F16"), weights=True) == found
    assert (found.parent / Path(FILES[3]).name).exists()


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "someone/m-GGUF",
            "name one of its GGUF files, as someone/m-GGUF/big/m-F16.gguf: big/m-F16.gguf, m-Q4_K_M.gguf",
        ),
        ("someone/m-GGUF:Q5_0", "has no GGUF file Q5_0; name one of its GGUF files"),
        ("someone/m-GGUF/other.gguf", "has no GGUF file other.gguf"),
        ("someone/several:Q4_0", "may mean several files, name one: a-Q4_0.gguf, b-Q4_0.gguf"),
    ],
)
def test_a_gguf_file_that_must_be_named(hub, name, message):
    hub.repositories["someone/m-GGUF"] = {file: b"" for file in FILES} | {"README.md": b""}
    hub.repositories["someone/several"] = {"a-Q4_0.gguf": b"", "b-Q4_0.gguf": b""}
    assert message in message_of(name)
    assert not any(file.endswith(".gguf") for file in hub.files_asked())


# repositories without a model


@pytest.mark.parametrize(
    "files, message",
    [
        (
            {"adapter_config.json": b'{"base_model_name_or_path": "a/base"}'},
            "is an adapter (LoRA) of a/base, not a model",
        ),
        ({"adapter_config.json": b"?"}, "is an adapter (LoRA) of its base model"),
        ({"README.md": b""}, "has no config.json: take one"),
        ({}, "has no config.json"),
        ({"weights.npz": b""}, "has no config.json but weights.npz, which cannot be read"),
        (
            {"config.json": json.dumps(TINY).encode(), "onnx/model.onnx": b""},
            "no weights in safetensors or .bin files but onnx",
        ),
        ({"config.json": json.dumps(TINY).encode(), "tf_model.h5": b""}, "but tf_model.h5, which cannot be read"),
        ({"config.json": json.dumps(TINY | {"quantization_config": {}}).encode()}, "the checkpoint is quantised"),
        ({"config.json": json.dumps(TINY | {"quantization": {"bits": 4}}).encode()}, "the checkpoint is quantised"),
        ({"config.json": b"<html>"}, "is not JSON"),
    ],
)
def test_a_repository_without_a_model_is_described(hub, files, message):
    hub.repositories[NAME] = files
    assert message in message_of(NAME)


# refusals and failures


@pytest.mark.parametrize(
    "refusal, message",
    [
        ((401, "RepoNotFound"), "check the name; for a private one log in with `hf auth login` or set HF_TOKEN"),
        ((403, "GatedRepo"), f"accept its licence on https://huggingface.co/{NAME}, then log in with `hf auth login`"),
        ((404, "RevisionNotFound"), "no branch, tag or commit main"),
        ((401, ""), "log in with `hf auth login`"),
        ((403, ""), "your token has no access"),
    ],
)
def test_a_refusal_of_the_hub_comes_with_a_remedy(hub, refused, refusal, message):
    hub.refusal = refusal
    assert message in refused("--model", NAME, *SHORT)


def test_a_gated_repository_may_be_seen_but_not_read(hub, model):
    hub.repositories[NAME] = files_of(model)
    hub.gated = True
    assert "accept its licence" in message_of(NAME)


class Answered(OSError):
    def __init__(self, status: int):
        self.response = type("Response", (), {"status_code": status})


class ProxyError(Exception):
    pass


class ReadTimeout(Exception):
    pass


@pytest.mark.parametrize(
    "error, message",
    [
        (Answered(429), "too many requests from here (HTTP 429): wait"),
        (Answered(503), "is down (HTTP 503): try again later"),
        (OSError(28, "No space left on device"), "no space is left for it in"),
        (PermissionError(13, "Permission denied"), "cannot be written: set HF_HOME"),
        (OSError(30, "Read-only file system"), "cannot be written: set HF_HOME"),
        (OSError(20, "Not a directory"), "cannot be written: set HF_HOME"),
        (ReadTimeout("timed out"), "does not answer (timed out)"),
        (ProxyError("502"), "the proxy cannot be used (502): check HTTPS_PROXY"),
        (ConnectionError("[SSL: CERTIFICATE_VERIFY_FAILED]"), "set SSL_CERT_FILE"),
        (ConnectionError("no route\nto host"), "(no route): check the name and the network"),
        (RuntimeError(), "(RuntimeError)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_failure_on_the_way_comes_with_a_remedy(monkeypatch, tmp_path, error, message, wrapped):
    """Even where the hub's client wraps it in a paragraph."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils import LocalEntryNotFoundError

    def fail(*args, **options):
        if wrapped:
            raise LocalEntryNotFoundError("A paragraph\nof many lines") from error
        raise error

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    told = message_of(NAME)
    assert told.startswith(f"cannot get the model {NAME!r}: ")
    assert (message if not wrapped else message.partition("): check the name")[0]) in told


# names


@pytest.mark.parametrize(
    "name, meant",
    [
        ("opt-125m", Repository("facebook/opt-125m")),
        (" owner/name/\n", Repository("owner/name")),
        ("owner/name@main", Repository("owner/name", "main")),
        ("opt-125m@refs/pr/3", Repository("facebook/opt-125m", "refs/pr/3")),
        ("http://www.huggingface.co/owner/name?library=transformers#usage", Repository("owner/name")),
        ("huggingface.co/owner/name/tree/v2", Repository("owner/name", "v2")),
        ("https://huggingface.co/owner/name/tree/refs%2Fpr%2F1", Repository("owner/name", "refs/pr/1")),
        ("hf://owner/name@v2", Repository("owner/name", "v2")),
        ("owner/name:Q4_K_M@v2", Repository("owner/name", "v2", "Q4_K_M")),
        ("owner/name/sub/file.gguf", Repository("owner/name", None, "sub/file.gguf")),
        *[(name, None) for name in ("file.gguf", "a/b/c", "a b", "...", "", "a\0b")],
        *[(f"owner/name@{revision}", None) for revision in ("", "a..b", "/v1", "v1@v2")],
    ],
)
def test_what_a_name_means(name, meant):
    assert repository(name) == meant


@pytest.mark.parametrize(
    "address, message",
    [
        ("https://huggingface.co/datasets/owner/name", "the address of datasets"),
        ("https://huggingface.co/spaces/owner/name", "the address of spaces"),
        ("https://huggingface.co/owner/name/tree/main/onnx", "give OWNER/NAME"),
        ("https://huggingface.co/owner/name/blob/main/README.md", "give OWNER/NAME"),
        ("https://huggingface.co/", "give OWNER/NAME"),
    ],
)
def test_an_address_of_something_else(address, message):
    with pytest.raises(UserError, match=message):
        repository(address)


@pytest.mark.parametrize(
    "model, revision, message",
    [
        (None, "main", "name it as `model`"),
        ("a/b", "", "must be a branch"),
        ("a/b", "../x", "must be a branch"),
        ("a/b", "a b", "must be a branch"),
        ("a/b", 1234567, "must be a branch"),
        ("a/b@v1", "v2", "contradicts"),
    ],
)
def test_an_impossible_revision(model, revision, message):
    with pytest.raises(UserError, match=message):
        with_revision(model, revision)


def test_a_folder_may_have_an_at_sign_in_its_name(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "tiny@v1")
    assert source.find_model("tiny@v1")[0] == Path("tiny@v1")


@pytest.mark.parametrize("name", ["tiny", "./tiny"])
def test_a_folder_has_no_revision(refused, model, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "tiny")
    assert f"--model {name} is on this machine" in refused("--model", name, "--revision", "main", *SHORT)


def test_a_misspelt_file_name_is_not_looked_up_on_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "demo").mkdir(parents=True)
    (tmp_path / "models" / "demo" / "file-q4.gguf").touch()
    assert "did you mean file-q4.gguf?" in message_of("models/demo/file-q5.gguf")
    assert hub.asked == []


def test_a_job_may_be_resumed_with_another_revision_of_the_same_files():
    old = {"model": "a/b", "model_revision": "1" * 40, "files": "same", "seed": 0}
    assert changes(old, old | {"model_revision": "2" * 40, "model": "a/b@v2"}) == []
    told = changes(old, old | {"model_revision": "2" * 40, "files": "other"})
    assert len(told) == 2 and "`model_revision`" in told[0]
