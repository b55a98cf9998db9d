"""h2o-flexgen serve as a process: killed and started again it goes on, and a signal stops it cleanly."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time

import pytest
from command_tools import FP32, ON_GPU, environment, percent, read_until

from h2o_flexgen.commands.main import main

for library in ("openai", "starlette", "uvicorn", "python_multipart"):
    pytest.importorskip(library)

import openai  # noqa: E402

pytest_plugins = ["command_tools"]

ROWS = 60


@pytest.fixture
def start(model, tmp_path):
    """start() -> the process of a server, and a client of it; the folder is the same each time."""
    started = []

    def run() -> tuple[subprocess.Popen, openai.OpenAI]:
        options = (*FP32, *percent(ON_GPU), "--gpu-batch-size", "2", "--ignore-eos", "--gen-len", "50")
        words = [sys.executable, "-m", "h2o_flexgen", "serve", "--model", str(model), *options]
        words += ["--folder", str(tmp_path / "data"), "--port", "0"]
        started.append(subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, bufsize=0))
        url = re.search(r" at (http://\S+/v1)", read_until(started[-1], ", data in "))[1]
        return started[-1], openai.OpenAI(base_url=url, api_key="any")

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


def wait(client: openai.OpenAI, id: str, is_there) -> object:
    """Poll a batch, as clients do, until `is_there`."""
    for _ in range(3000):
        batch = client.batches.retrieve(id)
        if is_there(batch):
            return batch
        time.sleep(0.01)
    raise AssertionError(f"still {batch}")


def test_a_killed_server_goes_on(start, tmp_path):
    source = tmp_path / "rows.jsonl"
    with open(source, "w") as file:
        for n in range(ROWS):
            body = {"model": "any", "prompt": [3 + n % 90, 4, 5]}
            print(
                json.dumps({"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": body}), file=file
            )
    process, client = start()
    with open(source, "rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    made = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h")
    begun = wait(client, made.id, lambda batch: batch.request_counts.completed)
    assert begun.request_counts.completed < ROWS
    process.kill()
    process.wait()
    process, client = start()
    batch = wait(client, made.id, lambda batch: batch.status == "completed")
    assert batch.request_counts.completed == batch.request_counts.total == ROWS
    lines = [json.loads(line) for line in client.files.content(batch.output_file_id).iter_lines()]
    assert [line["custom_id"] for line in lines] == [f"{n}" for n in range(ROWS)]
    process.send_signal(signal.SIGTERM)
    said = process.stderr.read().decode()
    assert process.wait(30) == 0
    assert int(re.search(r" of (\d+) rows done", said)[1]) < ROWS  # the others were kept
    assert said.endswith("stopped: the same command goes on with unfinished batches\n")


@pytest.mark.parametrize(
    "options, message",
    [
        (("--host", "0.0.0.0"), "--host 0.0.0.0 lets others use the server: give a key too"),
        (("--port", "70000"), "must be from 0 to 65535"),
        (("--api-key-file", "missing"), "cannot read --api-key-file missing"),
        (("--host", "nowhere.invalid", "--api-key-file", "key"), "--host nowhere.invalid is no address"),
        (("--host", "192.0.2.1", "--api-key-file", "key"), "cannot serve at --host 192.0.2.1, --port 8000"),
    ],
)
def test_bad_options(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("secret\n")
    assert main(["serve", "--folder", "data", *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_without_the_extra(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("h2o_flexgen.server.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    assert main(["serve"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: the web server cannot be loaded (") and err.endswith(
        "): pip install starlette uvicorn python-multipart\n"
    )
