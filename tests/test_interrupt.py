"""A job that is stopped, politely or not: finished rows are kept, temporary files go."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cli_tools import (
    FP32,
    ON_DISK,
    end,
    environment,
    last_line,
    percent,
    read_rows,
    read_until,
    start,
    wide,
    write_prompts,
)

from h2o_flexgen.engine.observer import Observer, ProgressBar
from h2o_flexgen.errors import Interrupted
from h2o_flexgen.interrupts import STOPPING, check, deferred, take_over
from h2o_flexgen.jobs.output import OutputFile

pytest_plugins = ["cli_tools"]

#: a random model whose job, all on disk, would take minutes
SLOW = wide(256, vocab_size=512, num_hidden_layers=16, num_attention_heads=8, max_position_embeddings=2048)
GEN_LEN = 1000
#: two blocks of four, lengths of their own: the longer prompts come first
PROMPTS = [[10 + (7 * n + m) % 400 for m in range(40 + 10 * (n % 4) + 100 * (n >= 4))] for n in range(8)]
FIRST, SECOND = {4, 5, 6, 7}, {0, 1, 2, 3}


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("slow")
    (folder / "config.json").write_text(json.dumps(SLOW))
    return folder


@pytest.fixture(scope="module")
def whole(slow) -> list[list[int]]:
    """The first 12 tokens of every prompt, by a job that nobody stops."""
    from h2o_flexgen import LLM, SamplingParams

    with LLM(str(slow), path="_DUMMY_", device="cpu", dtype="float32", progress=False) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def job(slow, tmp_path):
    """Start the slow job as a process; whatever becomes of the test, it ends."""
    running = []
    rows = write_prompts(tmp_path / "in.jsonl", PROMPTS)

    def begin(*options, gen_len: int = GEN_LEN, prompts: tuple = ("--input-file", rows)) -> subprocess.Popen:
        process = start(
            *("--model", slow, "--path", "_DUMMY_", *FP32, *prompts, "--gen-len", gen_len),
            *("--ignore-eos", "--gpu-batch-size", 2, "--num-gpu-batches", 2, *percent(ON_DISK)),
            *("--offload-dir", tmp_path / "offload", *options),
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def offloaded(process: subprocess.Popen) -> set[str]:
    """What a job that runs holds on disk: files without a name."""
    links = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
    return {Path(link).name.split("-")[0] for link in links if "/offload/" in link and link.endswith("(deleted)")}


def assert_clean(tmp_path: Path, *files: str) -> None:
    """Nothing is left but the input and what is named."""
    assert list((tmp_path / "offload").iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == sorted(["in.jsonl", *files])


SIGNALS = list(STOPPING)
OUT = ("out.jsonl", "out.jsonl.manifest.json")


@pytest.fixture(autouse=True)
def in_a_terminal():
    """These tests may run under nohup, which the jobs of theirs must not take to be their own."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def handled():
    take_over()


@pytest.mark.parametrize("number", SIGNALS, ids=lambda s: s.name)
def test_stopped_in_prefill(job, tmp_path, number):
    """No row is finished: the output file is empty."""
    files = ("--output-file", tmp_path / "out.jsonl", "--report", tmp_path / "report.json")
    process = job(*files, prompts=("--prompt-len", 1500), gen_len=500)  # seconds of prefill
    read_until(process, "block 1/1 prefill 2/")
    assert stat.S_IMODE((tmp_path / "offload").stat().st_mode) == 0o700
    assert offloaded(process) == {"weights", "kv_cache", "activations"}
    process.send_signal(number)
    code, out, err = end(process)
    assert code == 128 + number, err
    assert last_line(err).startswith("interrupted: 0 of 4 rows") and "Traceback" not in err and out == ""
    assert_clean(tmp_path, *OUT)
    assert read_rows(tmp_path / "out.jsonl") == []


@pytest.mark.parametrize("number", SIGNALS, ids=lambda s: s.name)
def test_stopped_in_decode_no_half_row_is_written(job, tmp_path, number):
    process = job("--output-file", tmp_path / "out.jsonl", "--overlap")
    read_until(process, "block 1/2 token ")
    process.send_signal(number)
    code, out, err = end(process)
    assert code == 128 + number, err
    assert last_line(err) == "interrupted: 0 of 8 rows are done; the same command goes on"
    assert "Traceback" not in err and out == ""
    assert_clean(tmp_path, *OUT)
    assert read_rows(tmp_path / "out.jsonl") == []


@pytest.mark.parametrize("overlap", ["--overlap", "--no-overlap"])
def test_stopped_in_the_second_block_the_same_command_goes_on(job, whole, tmp_path, overlap):
    options = ("--output-file", tmp_path / "out.jsonl", overlap)
    process = job(*options, gen_len=12)
    read_until(process, "block 2/2 prefill 17/")
    process.send_signal(signal.SIGTERM)
    code, out, err = end(process)
    if code == 0:
        pytest.skip("the second block was done before the signal came")
    assert code == 143, err
    assert last_line(err).startswith("interrupted: ") and "Traceback" not in err and out == ""
    assert_clean(tmp_path, *OUT)
    assert {row["index"] for row in read_rows(tmp_path / "out.jsonl")} >= FIRST
    code, _, err = end(job(*options, gen_len=12))
    assert code == 0 and "goes on: 4 of 8 rows are done" in err
    rows = read_rows(tmp_path / "out.jsonl")
    assert [(row["index"], row["token_ids"]) for row in rows] == list(enumerate(whole))


def test_a_job_under_nohup_outlives_its_terminal(cli, model, tmp_path):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert cli("--model", model, *FP32, "--num-prompts", 1, "--prompt-len", 3, "--gen-len", 2)[0] == 0
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_killed_in_the_second_block_and_started_again(job, whole, tmp_path):
    """What was offloaded goes with the process, though the process cannot clear up; the first block's rows stay."""
    process = job("--output-file", tmp_path / "out.jsonl", gen_len=12)
    read_until(process, "block 2/2 prefill 1/")
    process.kill()
    if end(process)[0] == 0:
        pytest.skip("the job was done before the signal came")
    assert list((tmp_path / "offload").iterdir()) == []
    assert {row["index"] for row in read_rows(tmp_path / "out.jsonl")} == FIRST
    code, _, err = end(job("--output-file", tmp_path / "out.jsonl", gen_len=12))
    assert code == 0, err
    assert_clean(tmp_path, *OUT)
    assert [row["token_ids"] for row in read_rows(tmp_path / "out.jsonl")] == whole


def test_rows_of_a_batch_that_has_finished_are_there_before_its_block_has(model):
    """One batch of two ends at its stop token, the other goes on for several steps."""
    from h2o_flexgen import LLM, Policy, SamplingParams

    seen, steps = [], iter(range(10**6))

    class Progress(Observer):
        def on_progress(self, i, j, tokens):
            if seen:
                next(steps)

    options = dict(device="cpu", dtype="float32", progress=False, observer=Progress())
    prompts, params = [[5, 6, 7], [8, 9]], SamplingParams(temperature=1.0, max_tokens=8)
    with LLM(str(model), Policy(1, 2), **options) as llm:
        first, second = (output.outputs[0].token_ids for output in llm.generate(prompts, params))
        llm.eos_ids = frozenset([next(token for token in first[:4] if token not in second)])
        llm.generate(prompts, params, on_output=lambda o: seen.append((o.index, next(steps))))
    assert [index for index, _ in seen] == [0, 1]
    assert seen[1][1] > seen[0][1] + 1


def test_two_jobs_at_the_same_time(job, whole, tmp_path):
    """One starts beside the other and is killed hard; the other's files and tokens are untouched."""
    one = job("--output-file", tmp_path / "one.jsonl", gen_len=12)
    read_until(one, "block 1/2 prefill 1/")
    two = job("--output-file", tmp_path / "two.jsonl")
    read_until(two, "block 1/2 prefill 1/")
    beside = one.poll() is None
    two.kill()
    end(two)
    code, _, err = end(one)
    assert code == 0, err
    assert [row["token_ids"] for row in read_rows(tmp_path / "one.jsonl")] == whole
    assert list((tmp_path / "offload").iterdir()) == []
    if not beside:
        pytest.skip("the one was done before the other began")


@pytest.mark.parametrize("number", SIGNALS, ids=lambda s: s.name)
def test_stopped_before_the_model_is_there(cli, model, monkeypatch, number):
    """In this process: the signal comes while the weights' headers are read."""
    from h2o_flexgen.offload.checkpoint import Checkpoint

    monkeypatch.setattr(Checkpoint, "add_file", lambda self, path: signal.raise_signal(number))
    code, out, err = cli("--model", model)
    assert (code, out, err) == (128 + number, "", "interrupted\n")


def test_while_a_job_runs_a_signal_waits_for_the_next_check(handled):
    reached = []
    with pytest.raises(Interrupted) as raised, deferred():
        check()
        signal.raise_signal(signal.SIGTERM)
        reached.append("check")
        check()
        reached.append("end")
    assert reached == ["check"] and raised.value.signum == signal.SIGTERM
    check()


def test_the_end_of_a_job_is_a_check(handled):
    """Also where it ends in an error: who asked the job to stop is told that it has."""
    with pytest.raises(Interrupted), deferred():
        signal.raise_signal(signal.SIGHUP)
    take_over()
    with pytest.raises(Interrupted), deferred():
        signal.raise_signal(signal.SIGTERM)
        raise ValueError
    with pytest.raises(ValueError), deferred():
        raise ValueError


@pytest.mark.parametrize("running", [True, False], ids=["while it runs", "while it clears up"])
def test_ctrl_c_behind_the_first_signal_ends_a_command_at_once(running):
    """Also while a disk hangs, or a library waits for its downloads. Other signals do nothing more."""
    code = f"""
import signal
from h2o_flexgen.interrupts import deferred, take_over
take_over()
try:
    with deferred():
        for s in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
            signal.raise_signal(s)
        if {running}:
            signal.raise_signal(signal.SIGINT)
finally:
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == done.stderr == ""


def test_outside_a_command_ctrl_c_waits_too_and_a_second_is_pythons():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    terminate = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted), deferred():
        assert signal.getsignal(signal.SIGTERM) == terminate
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        check()
    with deferred():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_another_thread_a_job_runs_without_signals():
    """Only the main thread can set handlers."""

    def run() -> str:
        with deferred():
            return "done"

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result() == "done"


@pytest.mark.parametrize("placement", [ON_DISK, ("100", "0", "100", "0", "100", "0")], ids=["disk", "gpu"])
def test_an_interrupt_at_any_step_ends_the_job_cleanly(cli, model, tmp_path, monkeypatch, placement):
    """In this process, at every call of the progress bar in turn: prefill, decode, either block."""
    rows, target = write_prompts(tmp_path / "in.jsonl", [[5, 6, 7], [8, 9], [10], [11]]), tmp_path / "out.jsonl"
    files = ("--input-file", rows, "--output-file", target, "--offload-dir", tmp_path / "offload")
    argv = ("--model", model, *FP32, "--gen-len", 3, "--gpu-batch-size", 2, "--ignore-eos", *percent(placement), *files)
    assert cli(*argv)[0] == 0
    whole = read_rows(target)
    real, steps = ProgressBar.on_progress, 2 * 3 * 5  # blocks, tokens, layers

    for stop in range(steps):
        seen = iter(range(steps + 1))

        def progress(self, *step, seen=seen, stop=stop):
            if next(seen) == stop:
                raise Interrupted(signal.SIGINT)
            real(self, *step)

        target.unlink()
        with monkeypatch.context() as patch:
            patch.setattr(ProgressBar, "on_progress", progress)
            code, _, err = cli(*argv)
        assert code == 130 and last_line(err).startswith("interrupted: ")
        # a block whose last token is there but which has not ended counts as finished too
        assert read_rows(target) == whole[: 2 * ((stop + 1) // 15)], stop
        assert not (tmp_path / "offload").exists() or os.listdir(tmp_path / "offload") == []
        assert not list(tmp_path.glob("*.new"))
        if stop % 7 == 0:
            assert cli(*argv)[0] == 0
            assert read_rows(target) == whole


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_an_interrupt_while_the_output_file_is_finished(cli, model, tmp_path, monkeypatch, call):
    """Before or after any step of it: no row is lost, nothing else is left, and the same command ends it."""
    rows, target = write_prompts(tmp_path / "in.jsonl", [[8, 9], [5, 6, 7]]), tmp_path / "out.jsonl"
    argv = ("--model", model, *FP32, "--gen-len", 3, "--input-file", rows, "--output-file", target)
    argv += ("--gpu-batch-size", 1)
    real, finish = getattr(os, call), OutputFile.finish
    for before in (True, False):
        target.unlink(missing_ok=True)

        def interrupted(*args, before=before):
            is_last = len(read_rows(target)) == 2
            if is_last and before:
                signal.raise_signal(signal.SIGTERM)
            real(*args)
            if is_last and not before:
                signal.raise_signal(signal.SIGTERM)

        def at_end(self, order):
            with monkeypatch.context() as patch:
                patch.setattr(os, call, interrupted)
                finish(self, order)

        with monkeypatch.context() as patch:
            patch.setattr(OutputFile, "finish", at_end)
            code, _, err = cli(*argv)
        assert code == 143 and last_line(err).startswith("interrupted")
        assert len(read_rows(target)) == 2
        assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"in.jsonl", *OUT}
        assert cli(*argv)[0] == 0
        assert [row["index"] for row in read_rows(target)] == [0, 1]


def test_an_interrupt_while_a_finished_row_is_handed_over_does_not_lose_it(model):
    from h2o_flexgen import LLM, SamplingParams

    seen = []

    def take(output):
        if not seen:
            seen.append(None)
            raise Interrupted(signal.SIGINT)
        seen.append((output.index, output.outputs[0].finish_reason, len(output.outputs)))

    with LLM(str(model), device="cpu", dtype="float32", progress=False) as llm, pytest.raises(Interrupted):
        llm.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=3, ignore_eos=True), on_output=take)
    assert sorted(seen[1:]) == [(0, "length", 1), (1, "length", 1)]
