"""A job that is stopped, politely or not: finished rows are kept, temporary files go."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command_tools import (
    FP32,
    ON_DISK,
    end,
    environment,
    last_line,
    read_rows,
    read_until,
    start,
    wide,
    write_prompts,
    write_rows,
)
from transformers import PreTrainedTokenizerBase

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.engine.observer import ProgressBar
from h2o_flexgen.errors import Interrupted
from h2o_flexgen.storage.checkpoint import Checkpoint
from h2o_flexgen.utils.interrupts import STOPPING, check, deferred, take_over

pytest_plugins = ["command_tools"]

#: a random model whose job, all on disk, would take minutes
SLOW = wide(256, vocab_size=512, num_hidden_layers=16, num_attention_heads=8, max_position_embeddings=2048)


def prompt(n: int) -> list[int]:
    return [10 + (7 * n + m) % 400 for m in range(40 + 10 * (n % 4) + 100 * (n >= 4))]


#: eight for four places, all of different lengths: the longer ones start first
PROMPTS = list(map(prompt, range(8)))


@pytest.fixture
def job(tmp_path):
    """The options of the slow job."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "config.json").write_text(json.dumps(SLOW))
    model = ("--model", tmp_path / "slow", "--path", "_DUMMY_", *FP32, "--ignore-eos")
    block = ("--gpu-batch-size", 2, "--num-gpu-batches", 2, "--percent", *ON_DISK)
    rows = write_prompts(tmp_path / "in.jsonl", PROMPTS)
    files = ("--input-file", rows, "--output-file", tmp_path / "out.jsonl", "--offload-dir", tmp_path / "offload")
    return *model, *block, *files


def assert_clean(folder: Path) -> None:
    """Only the files that the user named and the manifest are left."""
    assert not (folder / "offload").exists() or os.listdir(folder / "offload") == []
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    assert files == ["in.jsonl", "out.jsonl", "out.jsonl.manifest.json"]


@pytest.fixture(autouse=True)
def handled():
    """As in a command in a terminal, though the tests may run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    take_over()


def test_a_signal_stops_a_job(job, tmp_path):
    with start(*job, "--gen-len", 1000) as process:
        read_until(process, "pass 2 of")
        process.send_signal(signal.SIGTERM)
        code, out, err = end(process)
    assert (code, out) == (128 + signal.SIGTERM, "") and "Traceback" not in err
    assert last_line(err) == "interrupted: 0 of 8 rows are done; the same command resumes the job"
    assert_clean(tmp_path)
    assert read_rows(tmp_path / "out.jsonl") == []


def test_a_job_killed_while_the_second_half_prefills_resumes(job, tmp_path, cli):
    job += ("--gen-len", 12)
    with start(*job) as process:
        read_until(process, "pass 13 of 4 rows, layer 1/")
        process.kill()
        code, _, err = end(process)
    if code == 0:
        pytest.skip("the job was done before the signal came")
    assert code == -signal.SIGKILL, err
    assert_clean(tmp_path)
    assert {row["index"] for row in read_rows(tmp_path / "out.jsonl")} == {4, 5, 6, 7}
    code, _, err = cli(*job)
    assert code == 0 and "resuming: 4 of 8 rows are done" in err
    with LLM(str(tmp_path / "slow"), path="_DUMMY_", device="cpu", dtype="float32", progress=False) as llm:
        whole = llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))
    assert [row["token_ids"] for row in read_rows(tmp_path / "out.jsonl")] == [o.outputs[0].token_ids for o in whole]


def test_a_job_under_nohup_outlives_its_terminal(cli, model):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert cli("--model", model, *FP32, "--num-prompts", 1, "--prompt-len", 3, "--gen-len", 2)[0] == 0
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_stopped_before_the_model_is_loaded(cli, model, monkeypatch):
    """In this process: the signal comes while the weights' headers are read."""
    monkeypatch.setattr(Checkpoint, "add_file", lambda self, path: signal.raise_signal(signal.SIGTERM))
    assert cli("--model", model) == (143, "", "interrupted\n")


def test_a_chat_template_without_an_end_is_stopped_by_the_first_signal(cli, talker, tmp_path, monkeypatch):
    folder = tmp_path / "endless"
    shutil.copytree(talker, folder)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(loop)
    rows = write_rows(tmp_path / "in.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    real = PreTrainedTokenizerBase.apply_chat_template

    def apply(self, *args, **options):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return real(self, *args, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", apply)
    code, out, err = cli("--model", folder, *FP32, "--input-file", rows, "--output-file", tmp_path / "out.jsonl")
    assert (code, out, err) == (143, "", "interrupted\n")
    assert not (tmp_path / "out.jsonl").exists()


def test_while_a_job_runs_a_signal_waits_for_the_next_check():
    with pytest.raises(Interrupted) as raised, deferred():
        check()
        signal.raise_signal(signal.SIGTERM)
        reached = True
        check()
        reached = False
    assert reached and raised.value.signum == signal.SIGTERM
    check()


def test_the_end_of_a_job_is_a_check():
    """Even if it ends in an error: whoever asked it to stop learns that it has."""
    with pytest.raises(Interrupted), deferred():
        signal.raise_signal(signal.SIGHUP)
        raise ValueError


@pytest.mark.parametrize("first, second", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGHUP)])
def test_a_second_signal_ends_a_command_at_once(first, second):
    """Even while a disk hangs, or a library waits for a download."""
    code = f"""
import signal
from h2o_flexgen.utils.interrupts import deferred, take_over
take_over()
with deferred():
    signal.raise_signal({first})
    signal.raise_signal({second})
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-second, "", "")


def test_outside_a_command_ctrl_c_waits_and_a_second_raises_at_once():
    for s in STOPPING:
        signal.signal(s, signal.default_int_handler if s == signal.SIGINT else signal.SIG_DFL)
    with pytest.raises(Interrupted), deferred():
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_another_thread_a_job_runs_without_signals():
    """Only the main thread can set handlers."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(deferred().__enter__).result()
    with pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("stop, number", list(zip((0, 4, 8, 12, 20, 28), STOPPING * 2)))
def test_each_signal_ends_the_job_cleanly_at_any_step(cli, model, tmp_path, monkeypatch, stop, number):
    """In this process, at a call of the progress bar: of two pairs of rows, each in 3 passes of 5 layers."""
    rows = write_prompts(tmp_path / "in.jsonl", [[5, 6, 7], [8, 9], [10], [11]])
    files = ("--input-file", rows, "--output-file", tmp_path / "out.jsonl", "--offload-dir", tmp_path / "offload")
    block = ("--gen-len", 3, "--ignore-eos", "--gpu-batch-size", 2, "--percent", *ON_DISK)
    job = ("--model", model, *FP32, *block, *files)
    real = ProgressBar.on_layer
    steps = iter(range(99))

    def progress(self, j):
        if next(steps) == stop:
            signal.raise_signal(number)
        real(self, j)

    monkeypatch.setattr(ProgressBar, "on_layer", progress)
    code, _, err = cli(*job)
    assert code == 128 + number and last_line(err).startswith("interrupted: ")
    done = read_rows(tmp_path / "out.jsonl")
    assert [row["index"] for row in done] == list(range(2 * (stop // 15)))
    assert_clean(tmp_path)
    assert cli(*job)[0] == 0
    assert len(read_rows(tmp_path / "out.jsonl")) == 4 and read_rows(tmp_path / "out.jsonl")[: len(done)] == done
