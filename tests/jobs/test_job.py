"""Jobs that resume: whatever stops one, the next run gives the file of a job that was never stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_tools import FP32, TINY, last_line, read_rows, write_model, write_rows
from machines import kernels

from h2o_flexgen import LLM, SamplingParams, UserError
from h2o_flexgen.engine.observer import ProgressBar
from h2o_flexgen.errors import Interrupted
from h2o_flexgen.jobs import input as jobs_input
from h2o_flexgen.jobs.job import Job, JobWriter
from h2o_flexgen.jobs.manifest import Manifest, manifest_path
from h2o_flexgen.jobs.output import OutputFile
from h2o_flexgen.jobs.settings import changes
from h2o_flexgen.kernels import int8, linear
from h2o_flexgen.models.fingerprint import fingerprint

pytest_plugins = ["command_tools"]

#: rows that set parameters of their own, one that cannot be run, and one of OpenAI's
ROWS = [
    {"prompt_token_ids": [5, 6, 7, 8, 9]},
    {"prompt_token_ids": [10, 11, 12], "max_tokens": 2},
    {"prompt_token_ids": [20, 30, 40, 50, 60, 70, 80] * 2, "custom_id": "long"},
    {"prompt_token_ids": []},
    {"prompt_token_ids": [9], "max_tokens": 6, "temperature": 1.2, "seed": 5},
    {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": [3, 4, 5, 6], "max_tokens": 3}},
]


@pytest.fixture
def job(cli, model, tmp_path):
    """Run the command on rows, in blocks of two: (exit code, stderr)."""

    def run(*options, rows: list = ROWS, gen_len: int = 4, out: str = "out.jsonl", of: Path = model) -> tuple[int, str]:
        files = ("--input-file", write_rows(tmp_path / "in.jsonl", rows), "--output-file", tmp_path / out)
        how = ("--ignore-eos", "--gpu-batch-size", 1, "--num-gpu-batches", 2)
        code, _, err = cli("--model", of, *FP32, *how, "--gen-len", gen_len, *files, *options)
        return code, err

    return run


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out.jsonl"


def timeless(path: Path) -> list[dict]:
    """The rows of a file, without timestamps."""
    rows = read_rows(path)
    for row in rows:
        if "response" in row:
            row["response"]["body"].pop("created", None)
    return rows


def interrupted_at(monkeypatch, stop: int) -> None:
    """Let a job be interrupted before its row number `stop` is added."""
    real = OutputFile.add
    seen = iter(range(99))

    def add(self, index, row):
        if next(seen) == stop:
            raise Interrupted(signal.SIGINT)
        real(self, index, row)

    monkeypatch.setattr(OutputFile, "add", add)


@pytest.mark.parametrize("options", [(), ("--temperature", "1.5", "--seed", "7", "--hh-ratio", "0.2")], ids=len)
def test_a_job_interrupted_at_any_row_resumes_to_the_same_file(job, out, tmp_path, monkeypatch, options):
    code, err = job(*options, out="whole.jsonl")
    assert code == 0, err
    whole = timeless(tmp_path / "whole.jsonl")
    for stop in range(len(ROWS)):
        with monkeypatch.context() as patch:
            interrupted_at(patch, stop)
            code, err = job(*options)
        assert code == 130 and "Traceback" not in err
        done = len(read_rows(out))
        assert done == stop
        assert last_line(err) == f"interrupted: {done} of 6 rows are done; the same command resumes the job"
        code, err = job(*options)
        assert code == 0, err
        assert timeless(out) == whole, stop
        for path in (out, Path(f"{out}.manifest.json")):
            path.unlink()


def test_rows_that_an_interrupt_cuts_short_are_not_written(job, out, monkeypatch):
    real = ProgressBar.on_layer
    steps = iter(range(99))

    def progress(self, j):
        if self.passes == 3 and next(steps) == 0:
            raise Interrupted(signal.SIGTERM)
        real(self, j)

    monkeypatch.setattr(ProgressBar, "on_layer", progress)
    assert job()[0] == 143
    assert all("error" in row or row["finish_reason"] == "length" for row in read_rows(out))


def test_a_kv_budget_stays_what_it_was_when_the_job_began(job, out, tmp_path, monkeypatch):
    """Even if the rows that are left have shorter prompts, or longer ones."""
    assert job("--hh-ratio", 0.2)[0] == 0
    before = timeless(out)
    longer = [*ROWS, {"prompt_token_ids": [7, 8, 9] * 10}]
    code, err = job("--hh-ratio", 0.2, rows=longer)
    assert code == 0 and "has 30 tokens, the longest so far had 14" in err and "2 heavy + 2 recent" in err
    assert timeless(out)[:6] == before and len(read_rows(out)) == 7
    code, err = job("--hh-size", 2, rows=longer)
    assert code == 0 and "nothing to do" in err


def test_the_budget_auto_is_the_one_that_was_chosen_first(job, out):
    manifest = Path(f"{out}.manifest.json")
    code, err = job("--hh-ratio", "auto")
    assert code == 0, err
    assert "hh-ratio  slots" in err  # the table of budgets
    first = json.loads(manifest.read_text())
    assert first["settings"]["kv_budget"] == "auto"
    code, err = job("--hh-ratio", "auto", rows=[*ROWS, {"prompt_token_ids": [7, 8, 9] * 10}])
    assert code == 0 and "hh-ratio  slots" not in err
    assert json.loads(manifest.read_text())["kv_budget"] == first["kv_budget"]


def test_a_job_that_is_done_computes_nothing(job, out, monkeypatch):
    assert job()[0] == 0
    before = out.read_bytes()
    stat = out.stat()
    monkeypatch.setattr(LLM, "run", None)
    code, err = job()
    assert code == 0
    assert "nothing to do: 5 of 6 rows are done, 1 failed, 0 are left" in err
    assert out.read_bytes() == before and out.stat().st_ino == stat.st_ino


def test_rows_that_are_new_or_changed_are_run_and_the_command_says_how_many(job, out, tmp_path):
    assert job(rows=ROWS[:4])[0] == 0
    rows = [ROWS[0], {"prompt_token_ids": [99]}, *ROWS[2:]]
    code, err = job(rows=rows)
    assert code == 0
    assert "resuming: 2 of 6 rows are done, 1 failed, 3 are left; 1 were changed and run again, 2 are new" in err
    assert job(rows=rows, out="whole.jsonl")[0] == 0
    assert timeless(out) == timeless(tmp_path / "whole.jsonl")


def test_rows_with_a_custom_id_may_move(job, out, tmp_path):
    rows = [{"prompt_token_ids": [n], "custom_id": f"row {n}", "temperature": 1.0} for n in (5, 6, 7)]
    assert job(rows=rows)[0] == 0
    code, err = job(rows=rows[::-1])
    assert code == 0 and "nothing to do: 3 of 3" in err
    assert job(rows=rows[::-1], out="whole.jsonl")[0] == 0
    assert read_rows(out) == read_rows(tmp_path / "whole.jsonl")


def test_rows_removed_from_the_input_are_removed_from_the_output(job, out):
    assert job()[0] == 0
    before = out.read_text()
    code, err = job(rows=ROWS[:3])
    assert code == 0 and "3 are no longer in the input" in err and "the old output file is kept in" in err
    assert Path(f"{out}~").read_text() == before and len(read_rows(out)) == 3
    assert len(Manifest.read(manifest_path(out)).rows) == 3


def test_another_file_of_slots_per_layer_is_another_job(job, out, tmp_path):
    path = tmp_path / "layers.json"
    options = ("--hh-size", 2, "--kv-rule", f"mean:layers={path}")
    path.write_text(json.dumps({"budgets": [0.1, 0.5], "losses": [[1, 0], [2, 0], [1, 0]]}))
    assert job(*options, rows=ROWS[:3])[0] == 0
    path.write_text(json.dumps({"budgets": [0.1, 0.5], "losses": [[2, 0], [1, 0], [1, 0]]}))
    code, err = job(*options)
    assert code == 2 and "what the file of --kv-rule's option layers says" in err


def test_another_input_file_does_not_discard_a_finished_job(job, out):
    assert job()[0] == 0
    before = out.read_bytes()
    code, err = job(rows=[{"prompt_token_ids": [n]} for n in range(30, 36)])
    assert code == 2 and "no row in" in err and "--restart" in err
    assert out.read_bytes() == before


def test_failed_rows_stay_failed_unless_they_are_asked_to_run_again(job, out, monkeypatch):
    """The first time the tokens of one row fail, as if its hidden states had overflowed."""
    real = LLM.admit

    def refuse(self, prompt, gen_len):
        if prompt == [9]:
            raise UserError("broken")
        return real(self, prompt, gen_len)

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "admit", refuse)
        assert job()[0] == 0
    code, err = job()
    assert code == 0 and "2 failed, 0 are left" in err and "2 rows could not be run; row 3: " in err
    assert read_rows(out)[4]["error"] == "broken"
    code, err = job("--retry-errors")
    assert code == 0 and "2 are left; 2 failed and run again" in err
    assert read_rows(out)[4]["token_ids"] and read_rows(out)[3]["error"]


@pytest.mark.parametrize(
    "options, say",
    [
        (("--seed", 5), "--seed 0, now 5"),
        (("--temperature", 1), "--temperature 0.0, now 1.0"),
        (("--stop", "a"), "--stop [], now ['a']"),
        (("--hh-size", 3), "--kv_budget"),
        (("--dtype", "bfloat16"), "--dtype 'float32', now 'bfloat16'"),
    ],
)
def test_other_settings_are_an_error_that_names_them(job, out, texts, options, say):
    assert job(of=texts)[0] == 0
    before = out.read_bytes()
    code, err = job(*options, of=texts)
    assert code == 2 and say.replace("--kv_budget", "kv_budget None, now {'heavy': 3") in last_line(err)
    assert "--restart" in last_line(err) and out.read_bytes() == before
    code, err = job(*options, "--restart", of=texts)
    assert code == 0 and "kept in" in err
    assert Path(f"{out}~").read_bytes() == before


def test_other_matmuls_are_another_setting(job, out):
    assert job("--compress-weight", "int8")[0] == 0
    code, err = job("--compress-weight", "int8", "--compute", "int8")
    assert code == 2 and "--compute 'exact', now 'int8'" in last_line(err)


def test_weights_in_4_bits_are_multiplied_as_when_the_job_began(job, out, monkeypatch, fast_blocks):
    """Even if this machine now measures differently; on a machine that cannot, the job does not resume."""
    options = ("--compress-weight", "int4", "--compute", "int8")
    for first in (False, True):
        linear.use(kernels(blocks=first))
        assert job(*options, "--restart")[0] == 0
        expected = timeless(out)
        assert job(*options, "--restart", rows=ROWS[:3])[0] == 0
        linear.use(kernels(blocks=not first))
        code, err = job(*options)
        assert code == 0 and timeless(out) == expected, err
        operands = {"int8": "int8", "int4": "int4" if first else "int8"}
        assert Manifest.read(manifest_path(out)).settings["operands"] == operands
    monkeypatch.setattr(int8, "takes_blocks", lambda: False)
    code, err = job(*options)
    assert code == 2 and "needs a CPU with AVX2" in last_line(err)


@pytest.mark.parametrize("first", [False, True], ids=["codes_of_8_bits", "as_stored"])
def test_manifests_of_earlier_versions_say_in_blocks(job, out, fast_blocks, first):
    """With one answer for all formats."""
    options = ("--compress-weight", "int4", "--compute", "int8")
    linear.use(kernels(blocks=first))
    assert job(*options)[0] == 0
    expected = timeless(out)
    assert job(*options, "--restart", rows=ROWS[:3])[0] == 0
    manifest = Manifest.read(manifest_path(out))
    del manifest.settings["operands"]
    manifest.settings |= {"in_blocks": True} if first else {}
    manifest.write(manifest_path(out), is_new=False).close()
    linear.use(kernels(blocks=not first))
    code, err = job(*options)
    assert code == 0 and "3 are left" in err and timeless(out) == expected, err


@pytest.mark.parametrize(
    "old, new, message",
    [
        ({"operands": {"int4": "int4"}}, {"int4": "int4"}, []),
        ({"operands": {"int4": "int4"}}, {"int4": "int8"}, ["what matmuls in int8 read of the weights"]),
        ({"in_blocks": True}, {"int8": "int8", "int4": "int4"}, []),
        ({"in_blocks": True}, {"int8": "int8", "int4": "int8"}, ["what matmuls in int8 read of the weights"]),
        ({"in_blocks": None}, {"int8": "int8", "int4": "int8"}, []),
        ({}, {"Q8_0": "int8", "Q6_K": "int8"}, ["what matmuls in int8 read of the weights"]),  # Q6_K was exact
        ({}, {"int8": "int8", "int4": "int4"}, ["what matmuls in int8 read of the weights"]),
        ({"operands": None, "compute": "exact"}, {"int4": "int4"}, ["`compute` 'exact', now 'int8'"]),
    ],
)
def test_a_job_with_other_operands_has_other_settings(old, new, message):
    assert changes({"compute": "int8"} | old, {"compute": "int8", "operands": new}) == message


def test_options_that_change_no_token_may_change(job, out, tmp_path):
    assert job(rows=ROWS[:3])[0] == 0
    code, err = job("--gpu-batch-size", 4, "--offload-dir", tmp_path / "elsewhere", "--gpu-mem", 2)
    assert code == 0, err


def test_two_restarts_keep_both_old_files(job, out):
    for gen_len in (2, 3, 4):
        assert job("--restart", gen_len=gen_len)[0] == 0
    kept = [Path(f"{out}{end}") for end in ("~", "~~", "")]
    assert [len(read_rows(path)[0]["token_ids"]) for path in kept] == [2, 3, 4]


def test_another_model_is_an_error_but_a_copy_is_not(job, out, model, tmp_path):
    assert job()[0] == 0
    assert job(of=shutil.copytree(model, tmp_path / "copy", copy_function=shutil.copyfile))[0] == 0
    other = write_model(tmp_path / "other", config=TINY | {"num_hidden_layers": 2})
    code, err = job(of=other)
    assert code == 2 and f"model '{model}', now '{other}'".replace("model ", "--model ") in err


def test_a_fingerprint_is_of_the_content(model, tmp_path):
    """A small file is read whole, a large one sampled; times do not matter."""
    weights = tmp_path / "w.safetensors"

    def of(content: bytes, vocabulary: dict) -> str:
        weights.write_bytes(content)
        tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary, chat_template=None)  # a slow one
        return fingerprint(None, weights, tokenizer)

    first = of(bytes(1000), {"a": 1, "b": 2})
    assert of(bytes(1000), {"b": 2, "a": 1}) == first
    large = bytes(10 << 20)
    others = [(bytes(999) + b"x", {"a": 1, "b": 2}), (bytes(1000), {"a": 2, "b": 1}), (large, {}), (large[1:], {})]
    others += [(large[:-1] + b"x", {}), (b"x" + large[1:], {})]
    assert len({first, *(of(*other) for other in others)}) == 7


def test_a_file_that_no_job_wrote_is_not_touched(job, out):
    out.write_text("my thesis\n")
    code, err = job()
    assert code == 2 and "is not one that a job wrote" in err and out.read_text() == "my thesis\n"
    assert job("--restart")[0] == 0
    assert Path(f"{out}~").read_text() == "my thesis\n"


def test_a_file_without_rows_counts_as_new(job, out):
    out.touch()
    assert job()[0] == 0
    out.unlink()  # its manifest stays
    assert job("--seed", 5)[0] == 0


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"settings": 5}', "\x00" * 100, "[" * 100_000])
def test_a_manifest_that_is_damaged(job, out, manifest):
    assert job()[0] == 0
    before = out.read_bytes()
    Path(f"{out}.manifest.json").write_text(manifest)
    code, err = job()
    assert code == 2 and "out.jsonl.manifest.json is damaged" in err and "--restart" in err
    assert out.read_bytes() == before
    assert job("--restart")[0] == 0


def test_half_a_row_at_the_end_is_ignored(job, out):
    assert job()[0] == 0
    whole = timeless(out)
    out.write_bytes(out.read_bytes()[:-20])
    code, err = job()
    assert code == 0 and "1 are left" in err
    assert timeless(out) == whole


@pytest.mark.parametrize(
    "line",
    [
        "",
        "garbage",
        "{}",
        '{"index": 0, "token_ids": 5}',
        '{"index": 99, "error": "no such row"}',
        '{"index": 1, "error": "twice"}',
        '{"custom_id": "b", "response": {}}',
        '{"index": [], "error": "x"}',
    ],
)
def test_a_line_that_is_not_a_row_of_the_job(job, out, line):
    assert job()[0] == 0
    lines = out.read_text().splitlines()
    edited = "".join(row + "\n" for row in [*lines[:2], line, *lines[3:]])
    out.write_text(edited)
    code, err = job()
    assert code == 2 and "line 3 is not a row of this job" in err and out.read_text() == edited


def test_a_second_job_on_the_same_file_is_refused(job, out):
    assert job()[0] == 0
    with Job(str(out)):
        code, err = job()
        assert code == 2 and "another job is writing" in last_line(err)
        assert job("--restart")[0] == 2
    assert job()[0] == 0


def test_of_two_jobs_that_begin_at_once_one_is_refused(job, out, monkeypatch):
    """The other one begins while the first one loads its weights."""
    real = JobWriter.on_begin

    def on_begin(self):
        monkeypatch.setattr(JobWriter, "on_begin", real)
        assert job()[0] == 0
        real(self)

    monkeypatch.setattr(JobWriter, "on_begin", on_begin)
    code, err = job()
    assert code == 2 and "another job" in last_line(err)
    assert len(read_rows(out)) == len(ROWS)


def test_nothing_is_written_before_the_job_has_room(job, out, tmp_path):
    code, err = job("--gpu-mem", 1e-5)
    assert code == 2, err
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["in.jsonl"]


def test_a_job_without_an_input_file_resumes_too(cli, model, out):
    job = ("--model", model, *FP32, "--prompt-len", 5, "--gen-len", 2, "--output-file", out)
    assert cli(*job, "--num-prompts", 2)[0] == 0
    code, _, err = cli(*job, "--num-prompts", 2)
    assert code == 0 and "nothing to do: 2 of 2" in err


def test_options_of_a_job_need_an_output_file(refused, model):
    for option in ("--restart", "--retry-errors"):
        assert f"{option} is for a job" in refused("--model", model, option, files=False)


def test_a_model_runs_one_job_after_the_other(model, tmp_path):
    rows = read_rows_of(tmp_path, ROWS[:2])
    with LLM(str(model), device="cpu", dtype="float32", progress=False) as llm:
        for name in ("a.jsonl", "b.jsonl"):
            with Job(str(tmp_path / name)) as job:
                job.run(llm, rows, SamplingParams(max_tokens=2))
                with pytest.raises(UserError, match="this Job has run"):
                    job.run(llm, rows, SamplingParams(max_tokens=2))
    for name in ("a.jsonl", "b.jsonl"):
        assert len(read_rows(tmp_path / name)) == 2 and (tmp_path / f"{name}.manifest.json").exists()


def read_rows_of(folder: Path, rows: list) -> list:
    return jobs_input.read_rows(str(write_rows(folder / "in.jsonl", rows)))


def test_a_job_with_a_truncating_tokenizer_resumes(job, texts, tmp_path):
    folder = tmp_path / "texts"
    shutil.copytree(texts, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["truncation"] = {"direction": "Right", "max_length": 32, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    rows = [{"prompt": "a text"}, {"prompt": "another"}]
    assert job(rows=rows, of=folder)[0] == 0
    code, err = job(rows=rows, of=folder)
    assert code == 0 and "nothing to do: 2 of 2" in err


def test_after_a_kill_during_a_restart_foreign_rows_are_not_mistaken_for_finished_ones(job, out, monkeypatch):
    foreign = '{"index": 0, "text": "", "token_ids": [99], "finish_reason": "stop"}\n'
    out.write_text(foreign)
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "write", lambda *args, **more: os._exit(9))
        patch.setattr("h2o_flexgen.engine.turns._first_process", None)  # the fork may make an LLM
        if os.fork() == 0:
            try:
                job("--restart")
            finally:
                os._exit(1)
        os.wait()
    assert Path(f"{out}~").read_text() == foreign
    assert job()[0] == 0
    assert 99 not in read_rows(out)[0]["token_ids"]


def test_the_report_cannot_overwrite_the_manifest(refused, model, tmp_path):
    out = tmp_path / "x.jsonl"
    message = refused("--model", model, "--output-file", out, "--report", f"{out}.manifest.json", files=False)
    assert "the manifest of --output-file and --report name the same file" in message


def test_an_output_file_keeps_its_mode(job, out):
    assert job(rows=ROWS[:2])[0] == 0
    out.chmod(0o600)
    assert job()[0] == 0
    assert out.stat().st_mode & 0o777 == 0o600
