"""The command line: what it reads, what it writes, and that others can script against it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from cli_tools import (
    FP32,
    ON_CPU,
    ON_DISK,
    ON_GPU,
    PROMPTS,
    TINY,
    command,
    environment,
    percent,
    read_rows,
    start,
    wide,
    write_model,
    write_prompts,
    write_rows,
)

from h2o_flexgen import flex_opt
from h2o_flexgen.errors import UserError
from h2o_flexgen.files import check_writable
from h2o_flexgen.jobs.output import OutputFile
from h2o_flexgen.models import source
from h2o_flexgen.policy import GIB, Policy

pytest_plugins = ["cli_tools"]

#: what `--json` promises to those who read it
REPORT = {
    "model": str,
    "device": str,
    "dtype": str,
    "workload": {"num_prompts": int, "prompt_len": int, "gen_len": int},
    "policy": dict,
    "kv_budget": {"heavy": int, "recent": int},
    "prefill": {"seconds": float, "tokens_per_s": float},
    "decode": {"seconds": float, "tokens_per_s": float},
    "total": {"seconds": float, "generated_tokens": int, "tokens_per_s": float},
    "peak_memory_bytes": {"gpu": int, "cpu": int, "disk": int},
    "planned_memory_bytes": {"gpu": int, "cpu": int, "disk": int},
    "bytes_moved": {"disk_to_cpu": int, "cpu_to_gpu": int, "gpu_to_cpu": int, "cpu_to_disk": int},
    "stall_seconds": {"weights": float, "cache": float},
}


def assert_shape(value, shape, where: str = "report") -> None:
    if isinstance(shape, dict):
        assert list(value) == list(shape), where
        for key in shape:
            assert_shape(value[key], shape[key], f"{where}.{key}")
    else:
        assert type(value) is shape, f"{where} is {value!r}"


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """A tiny model with a byte-level BPE tokenizer that puts </s> in front, as OPT's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(source.__file__).read_text()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 2)])
    folder = write_model(tmp_path_factory.mktemp("texts") / "model", config=TINY | {"vocab_size": 300})
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


# the report


@pytest.mark.parametrize("home", [ON_GPU, ON_CPU, ON_DISK], ids=["gpu", "cpu", "disk"])
@pytest.mark.parametrize("budget", [False, True], ids=["full", "h2o"])
def test_the_report_has_exactly_the_fields_of_the_contract(cli, model, tmp_path, home, budget):
    report = tmp_path / "report.json"
    where = (*percent(home), "--offload-dir", tmp_path / "offload", "--report", report, "--gpu-batch-size", 2)
    where += ("--num-gpu-batches", 2)  # the second has one sequence
    options = ("--hh-size", 3, "--recent-size", 2) if budget else ()
    job = ("--model", model, *FP32, "--prompt-len", 10, "--gen-len", 5, "--num-prompts", 3, "--ignore-eos")
    code, out, err = cli(*job, *where, *options)
    assert code == 0, err
    found = json.loads(report.read_text())
    assert_shape(found, REPORT if budget else REPORT | {"kv_budget": type(None)})
    assert found["model"] == str(model) and found["device"] == "cpu" and found["dtype"] == "float32"
    assert found["workload"] == {"num_prompts": 3, "prompt_len": 10, "gen_len": 5}
    assert Policy.from_dict(found["policy"]) == Policy(2, 2, tuple(map(float, home)))
    assert found["kv_budget"] == ({"heavy": 3, "recent": 2} if budget else None)
    total = found["total"]
    assert total["generated_tokens"] == 15
    assert total["seconds"] == pytest.approx(found["prefill"]["seconds"] + found["decode"]["seconds"])
    assert total["tokens_per_s"] == pytest.approx(15 / total["seconds"])
    assert found["prefill"]["tokens_per_s"] == pytest.approx(30 / found["prefill"]["seconds"])
    assert found["decode"]["tokens_per_s"] == pytest.approx(12 / found["decode"]["seconds"])
    moved = found["bytes_moved"]
    assert (moved["disk_to_cpu"] > 0) == (moved["cpu_to_disk"] > 0) == (home == ON_DISK)
    assert (moved["cpu_to_gpu"] > 0) == (home != ON_GPU)
    assert (found["planned_memory_bytes"]["disk"] > 0) == (home == ON_DISK)
    assert found["peak_memory_bytes"]["disk"] <= found["planned_memory_bytes"]["disk"]


def test_the_report_for_people_says_the_same(cli, model, tmp_path):
    report = tmp_path / "report.json"
    job = ("--model", model, *FP32, "--prompt-len", 10, "--gen-len", 5, "--num-prompts", 3, "--ignore-eos")
    code, out, _ = cli(*job, *percent(ON_DISK), "--report", report, "--hh-ratio", 0.2)
    assert code == 0
    found = json.loads(report.read_text())
    assert str(model) in out and "float32 on cpu" in out
    assert "3 prompts of up to 10 tokens, 5 tokens each" in out
    assert "2 heavy + 2 recent" in out
    assert "percent 0 0 0 0 0 0" in out
    assert f"15 tokens, {flex_opt.rate(found['total']['tokens_per_s'])} tokens/s" in out
    for phase in ("prefill", "decode"):
        assert f"{found[phase]['seconds']:.2f} s, {flex_opt.rate(found[phase]['tokens_per_s'])} tokens/s" in out
    assert "disk to cpu" in out and "planned" in out
    assert all(len(line) < 140 and line == line.rstrip() and "\r" not in line for line in out.splitlines())


def test_without_an_output_file_the_texts_are_on_stdout(cli, texts):
    code, out, _ = cli("--model", texts, *FP32, "--prompt-len", 12, "--gen-len", 5, "--num-prompts", 2)
    assert code == 0
    assert out.count("and the model goes on") == 2
    assert "\033" not in out  # no colours where no terminal is


def test_with_an_output_file_they_are_not(cli, model, tmp_path):
    code, out, _ = cli("--model", model, *FP32, "--gen-len", 3, "--prompt-len", 5, "--output-file", tmp_path / "o")
    assert code == 0
    assert "prompt 0" not in out and out.startswith("model")


def test_verbose_shows_policy_and_plan(cli, model):
    code, _, err = cli("--model", model, *FP32, "--gen-len", 3, "--prompt-len", 5, "--verbose")
    assert code == 0
    assert '"gpu_batch_size": 4' in err and "memory plan" in err and "KV cache" in err


def test_help_lists_every_option_of_the_contract(cli, capfd):
    with pytest.raises(SystemExit) as done:
        cli("--help")
    assert done.value.code == 0
    out = capfd.readouterr().out
    for option in (
        "model path prompt-len gen-len gpu-batch-size num-gpu-batches percent policy hh-ratio recent-ratio hh-size "
        "recent-size device dtype offload-dir overlap no-overlap gpu-mem cpu-mem disk-mem cpu-cache-compute "
        "input-file output-file ignore-eos temperature top-k top-p seed report verbose"
    ).split():
        assert f"--{option}" in out


# input and output files


def test_rows_come_in_the_order_of_the_input_with_exactly_four_fields(cli, model, tmp_path):
    """Blocks are made by length, so that the order of work is another."""
    prompts = [[3 + n % 7] * (1 + (5 * n) % 17) for n in range(23)]
    rows, out = write_prompts(tmp_path / "in.jsonl", prompts), tmp_path / "out.jsonl"
    job = ("--model", model, *FP32, "--gen-len", 4, "--gpu-batch-size", 3, "--num-gpu-batches", 2)
    code, _, err = cli(*job, "--input-file", rows, "--output-file", out)
    assert code == 0, err
    found = read_rows(out)
    assert [row["index"] for row in found] == list(range(23))
    for row in found:
        assert list(row) == ["index", "text", "token_ids", "finish_reason"]
        assert row["finish_reason"] in ("length", "stop")
        assert row["text"] == ""  # there is no tokenizer
        assert 1 <= len(row["token_ids"]) <= 4 and all(type(t) is int for t in row["token_ids"])
        assert row["finish_reason"] == "stop" or len(row["token_ids"]) == 4
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["in.jsonl", "out.jsonl"]


def test_a_row_stops_at_the_end_of_sequence_token(generate, model, tmp_path):
    whole = generate("--model", model, "--ignore-eos", gen_len=12)
    eos = whole[0]["token_ids"][2]
    shutil.copytree(model, tmp_path / "eos")
    (tmp_path / "eos" / "config.json").write_text(json.dumps(TINY | {"eos_token_id": [eos, 1]}))
    for row, full in zip(generate("--model", tmp_path / "eos", gen_len=12), whole):
        ids = full["token_ids"]
        if eos in ids:
            ids = ids[: ids.index(eos) + 1]
        stopped = ids[-1] in (eos, 1)
        assert row["token_ids"] == ids and row["finish_reason"] == ("stop" if stopped else "length")


def test_an_output_file_that_was_there_is_replaced_whole(generate, model, tmp_path):
    (tmp_path / "generate.out.jsonl").write_text("old\n" * 1000)
    assert len(generate("--model", model)) == len(PROMPTS)


def test_a_link_to_an_output_file_stays_one(cli, model, tmp_path):
    real, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(real)
    rows = write_prompts(tmp_path / "in.jsonl")
    code, _, _ = cli("--model", model, "--gen-len", 2, "--input-file", rows, "--output-file", link)
    assert code == 0
    assert link.is_symlink() and len(read_rows(real)) == len(PROMPTS)


def test_texts_need_a_tokenizer_and_ids_need_none(cli, texts, model, tmp_path):
    rows = write_rows(
        tmp_path / "in.jsonl",
        [{"prompt": "def find_model"}, {"prompt_token_ids": [5, 6, 7]}, {"prompt": "grüße ✓"}, {"prompt": ""}],
    )
    found = {}
    for name, folder in (("with", texts), ("without", model)):
        out = tmp_path / f"{name}.jsonl"
        files = ("--input-file", rows, "--output-file", out)
        code, _, err = cli("--model", folder, *FP32, "--gen-len", 4, "--ignore-eos", *files)
        assert code == 0, err
        found[name] = read_rows(out)
    assert [set(row) for row in found["without"]] == [
        {"index", "error"},
        {"index", "text", "token_ids", "finish_reason"},
        {"index", "error"},
        {"index", "error"},
    ]
    assert all("tokenizer" in row["error"] for row in found["without"] if "error" in row)
    assert found["with"][3] == {"index": 3, "error": "the prompt is empty"}
    for row in found["with"][:3]:
        assert isinstance(row["text"], str) and len(row["token_ids"]) == 4


def test_a_text_and_its_ids_give_the_same(cli, texts, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(texts)
    prompt = 'import json\n\n\ndef f(x: str) -> "Folder":\n'
    ids = tokenizer(prompt)["input_ids"]
    assert ids[0] == 2 and max(ids) >= 259  # </s> in front, and merges
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt": prompt}, {"prompt_token_ids": ids}])
    out = tmp_path / "out.jsonl"
    code, _, _ = cli("--model", texts, *FP32, "--gen-len", 6, "--input-file", rows, "--output-file", out)
    assert code == 0
    text, by_ids = read_rows(out)
    assert text["token_ids"] == by_ids["token_ids"]
    assert text["text"] == by_ids["text"] == tokenizer.decode(text["token_ids"], skip_special_tokens=True)


def test_any_text_is_one_row(cli, texts, tmp_path):
    """Line separators of Unicode inside a text do not end its row; blank lines are no rows; half a surrogate pair
    is an error of its row alone."""
    prompts = ["a\u2028b", "a\x85b", "a\u000bb\u000cc", "a\rb", "nul \x00", "\ufeffx", "\ud83d\ude00", "x" * 10]
    lines = [json.dumps({"prompt": p}, ensure_ascii=False).encode("utf-8", "surrogatepass") for p in prompts[:6]]
    lines += [json.dumps({"prompt": p}).encode() for p in prompts[6:]]
    lines += [b"", b"   ", json.dumps({"prompt": "half \ud800 a pair"}).encode()]
    rows, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows.write_bytes(b"\r\n".join(lines))
    code, _, err = cli("--model", texts, *FP32, "--gen-len", 2, "--input-file", rows, "--output-file", out)
    assert code == 0, err
    found = read_rows(out)
    assert len(found) == 9
    assert all("token_ids" in row for row in found[:8])
    assert set(found[8]) == {"index", "error"}


def test_a_byte_order_mark_is_no_error(cli, model, tmp_path):
    rows, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows.write_bytes(b'\xef\xbb\xbf{"prompt_token_ids": [5]}\n')
    code, _, err = cli("--model", model, *FP32, "--gen-len", 2, "--input-file", rows, "--output-file", out)
    assert code == 0, err
    assert "token_ids" in read_rows(out)[0]


# built-in prompts


class FakeLLM:
    """As much of an LLM as the built-in prompts need."""

    def __init__(self, folder: Path):
        self.tokenizer = source.load_tokenizer(folder)
        self.spec = type("Spec", (), {"vocab": 300})


@pytest.mark.parametrize("length", [1, 2, 3, 17, 512, 2048, 20_000])
def test_builtin_prompts_have_exactly_the_length(texts, model, length):
    for folder in (texts, model):
        llm = FakeLLM(folder)
        prompts = flex_opt.builtin_prompts(llm, 5, length)
        assert [len(ids) for ids in prompts] == [length] * 5
        assert all(type(t) is int and 0 <= t < 300 for ids in prompts for t in ids)
        if folder == texts:
            assert all(ids[0] == 2 for ids in prompts)
            assert all(2 not in ids[1:] for ids in prompts)


def test_builtin_prompts_are_many_and_differ(texts):
    prompts = flex_opt.builtin_prompts(FakeLLM(texts), 120, 64)
    assert len(prompts) == 120 and all(len(ids) == 64 for ids in prompts)
    assert len({tuple(ids) for ids in prompts}) == 120
    assert flex_opt.builtin_prompts(FakeLLM(texts), 120, 64) == prompts


@pytest.mark.parametrize(
    "options, count, length",
    [
        ((), 4, 32),  # 64 positions, less 32 tokens of output
        (("--num-prompts", "2"), 2, 32),
        (("--num-prompts", "7", "--gpu-batch-size", "3"), 7, 32),
        (("--gpu-batch-size", "3", "--num-gpu-batches", "2", "--prompt-len", "9"), 6, 9),
        (("--gpu-batch-size", "3", *percent(ON_DISK), "--prompt-len", "9", "--gen-len", "2"), 3, 9),
        ((*percent(ON_GPU), "--num-gpu-batches", "2", "--gen-len", "60"), 8, 4),
    ],
)
def test_the_workload_without_an_input_file(cli, model, tmp_path, options, count, length):
    report = tmp_path / "report.json"
    code, _, err = cli("--model", model, *options, "--report", report)
    assert code == 0, err
    workload = json.loads(report.read_text())["workload"]
    assert (workload["num_prompts"], workload["prompt_len"]) == (count, length)


@pytest.mark.parametrize("count, size", [("7", 7), ("64", 32)])
def test_a_batch_takes_the_prompts_there_are_up_to_32(cli, model, tmp_path, count, size):
    report = tmp_path / "report.json"
    options = (*percent(ON_DISK), "--num-prompts", count, "--prompt-len", "9", "--gen-len", "2")
    assert cli("--model", model, *options, "--report", report)[0] == 0
    assert json.loads(report.read_text())["policy"]["gpu_batch_size"] == size


def test_rows_of_every_killed_job_are_kept(tmp_path, capsys):
    for n in range(3):
        killed = OutputFile(str(tmp_path / "out.jsonl"))
        killed.add({"index": n})
        killed._file.close()  # and with it its lock
    kept = [tmp_path / f"out.jsonl.partial{end}" for end in ("~", "~1", "")]
    assert [json.loads(path.read_text())["index"] for path in kept] == [0, 1, 2]
    assert str(kept[1]) in capsys.readouterr().err


# policies


def test_a_policy_file_of_the_search_is_read(cli, model, tmp_path):
    policy = Policy(3, 2, (50.0, 25.0, 0.0, 50.0, 0.0, 0.0), False, True, 64)
    path, report = tmp_path / "policy.json", tmp_path / "report.json"
    for text in (policy.to_json(), json.dumps({"command": "search", "policy": json.loads(policy.to_json())})):
        path.write_text(text)
        job = ("--model", model, "--policy", path, "--prompt-len", 6, "--gen-len", 3, "--report", report)
        code, out, err = cli(*job, "--offload-dir", tmp_path / "offload")
        assert code == 0, err
        found = json.loads(report.read_text())
        assert Policy.from_dict(found["policy"]) == policy
        assert found["workload"]["num_prompts"] == 6
        assert "3 x 2, percent 50 25 0 50 0 0, overlap off" in out


def test_auto_stays_on_the_device_when_it_fits_and_spills_when_it_does_not(cli, tmp_path):
    folder = write_model(tmp_path / "wide", config=wide(256, num_hidden_layers=4))
    report = tmp_path / "report.json"
    job = ("--model", folder, *FP32, "--prompt-len", 8, "--gen-len", 3, "--num-prompts", 2, "--report", report)
    assert cli(*job, "--policy", "auto")[0] == 0
    whole = json.loads(report.read_text())
    assert whole["policy"]["percent"] == [100, 0, 100, 0, 100, 0]
    needed = whole["planned_memory_bytes"]["gpu"]
    resident = 4 * 12 * 256 * 256 * 4  # about the bytes of the layers
    code, _, err = cli(*job, "--gpu-mem", (needed - resident // 3) / GIB, "--offload-dir", tmp_path / "offload")
    assert code == 0, err
    spilled = json.loads(report.read_text())
    assert spilled["policy"]["percent"][0] < 100
    assert spilled["planned_memory_bytes"]["gpu"] <= needed - resident // 3
    assert spilled["bytes_moved"]["disk_to_cpu"] > 0


# what the process does


def test_a_reader_of_stdout_that_has_gone_is_no_error(model, tmp_path):
    report = tmp_path / "report.json"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command("--model", model, "--prompt-len", 5, "--gen-len", 2, "--report", report),
        env=environment(),
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert json.loads(report.read_text())["total"]["generated_tokens"] > 0


def test_a_full_disk_behind_stdout_is_an_error(model, tmp_path):
    with open("/dev/full", "w") as full:
        argv = command("--model", model, "--prompt-len", 5, "--gen-len", 2, "--report", tmp_path / "report.json")
        done = subprocess.run(argv, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert done.stderr.splitlines()[-1] == "error: cannot write to stdout: No space left on device"
    assert json.loads((tmp_path / "report.json").read_text())["total"]["generated_tokens"] > 0


def test_a_report_that_cannot_be_written_takes_nothing_else_along(model):
    argv = command("--model", model, "--prompt-len", 5, "--gen-len", 2, "--report", "/dev/full")
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: cannot write --report /dev/full: No space left on device"
    assert "--- prompt 0" in done.stdout and "tokens/s" in done.stdout


def test_a_report_can_go_to_a_device_whose_folder_is_read_only(monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, how: str(path) == "/dev/null")
    check_writable("--report", Path("/dev/null"))


@pytest.mark.parametrize("good", [True, False], ids=["good", "refused"])
def test_a_full_disk_behind_stderr_ends_no_job(model, tmp_path, good):
    out = tmp_path / "out.jsonl"
    argv = command("--model", model if good else tmp_path / "none", "--prompt-len", 5, "--gen-len", 9, "--verbose")
    with open("/dev/full", "w") as full:
        done = subprocess.run([*argv, "--output-file", out], env=environment(), stdout=subprocess.PIPE, stderr=full)
    assert done.returncode == (0 if good else 2)
    assert out.exists() == good


def test_a_closed_stderr_ends_no_job(model, tmp_path):
    argv = command("--model", model, "--prompt-len", 5, "--gen-len", 9, "--output-file", tmp_path / "out.jsonl")
    done = subprocess.run(["sh", "-c", '"$@" 2>&-', "sh", *argv], env=environment(), stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("model ")
    assert len(read_rows(tmp_path / "out.jsonl")) == 4


def test_a_reader_of_stderr_that_has_gone_ends_the_job_as_a_signal_would(model):
    process = start("--model", model, "--prompt-len", 30, "--gen-len", 30, "--num-prompts", 40)
    process.stderr.close()
    assert process.wait(60) == 128 + signal.SIGPIPE


# models from the hub


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """An empty Hugging Face cache, offline."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    return tmp_path / "hf"


def cache_model(home: Path, name: str, folder: Path, skip: tuple = ()) -> Path:
    """Lay a folder's files out as the hub's client does after a download; returns the snapshot."""
    root = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = root / "snapshots" / ("0" * 40)
    (root / "blobs").mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0" * 40)
    snapshot.mkdir(parents=True)
    # what the repository holds, with files that nobody downloads
    names = [".gitattributes", "flax_model.msgpack", *(file.name for file in folder.iterdir())]
    tree = {"format_version": 1, "files": {name: {"size": 1, "blob_id": "0"} for name in names}}
    (root / "trees").mkdir()
    (root / "trees" / f"{'0' * 40}.json").write_text(json.dumps(tree))
    for n, file in enumerate(sorted(folder.iterdir())):
        if file.name not in skip:
            shutil.copy(file, root / "blobs" / str(n))
            (snapshot / file.name).symlink_to(f"../../blobs/{n}")
    return snapshot


def test_a_model_in_the_local_hub_cache_needs_no_network(hub, generate, model):
    cache_model(hub, "someone/tiny-opt", model)
    assert generate("--model", "someone/tiny-opt", *percent(ON_DISK)) == generate("--model", model)


def test_a_model_in_the_local_hub_cache_by_environment(hub, model, tmp_path):
    """As a user has it: HF_HOME and HF_HUB_OFFLINE set outside the process, which starts in any folder."""
    cache_model(hub, "someone/tiny-opt", model)
    rows, out = write_prompts(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    env = {k: v for k, v in environment(HF_HOME=str(hub)).items() if k not in ("HF_HUB_CACHE", "TRANSFORMERS_CACHE")}
    argv = command("--model", "someone/tiny-opt", "--gen-len", 2, "--input-file", rows, "--output-file", out)
    (tmp_path / "cwd").mkdir()
    done = subprocess.run(argv, env=env, cwd=tmp_path / "cwd", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(read_rows(out)) == len(PROMPTS)
    assert list((tmp_path / "cwd").iterdir()) == []


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_half_a_download_is_gone_on_with(hub, model, monkeypatch, missing):
    """A snapshot without all its files is no model: what is missing is downloaded."""
    import huggingface_hub

    snapshot = cache_model(hub, "someone/tiny-opt", model, skip=(missing,))
    asked = []
    real = huggingface_hub.snapshot_download

    def download(name, **options):
        if options.get("local_files_only"):
            return real(name, **options)
        asked.append(options["allow_patterns"])
        shutil.copy(model / missing, snapshot / missing)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, name: ["a.bin", "model.safetensors"])
    assert source.find_model("someone/tiny-opt") == (snapshot, snapshot)
    assert len(asked) == 2 and not any("bin" in p or "safetensors" in p for p in asked[0])  # the config comes first
    assert "*.safetensors*" in asked[1] and not any("bin" in p for p in asked[1])
    assert source.find_model("someone/tiny-opt") == (snapshot, snapshot)
    assert len(asked) == 2  # now it is whole


def test_half_a_sharded_download_is_gone_on_with(hub, model, tmp_path):
    folder = tmp_path / "sharded"
    shutil.copytree(model, folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    cache_model(hub, "someone/tiny-opt", folder)
    with pytest.raises(UserError, match="cannot get the model 'someone/tiny-opt'"):
        source.find_model("someone/tiny-opt")


def test_weights_of_a_folder_are_not_downloaded_too(hub, model, tmp_path, monkeypatch):
    import huggingface_hub

    weights = tmp_path / "weights"
    weights.mkdir()
    shutil.copy(model / "model.safetensors", weights)
    asked = []

    def download(name, **options):
        if options.get("local_files_only"):
            raise FileNotFoundError(name)
        asked.append((name, options["allow_patterns"]))
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert source.find_model("opt-125m", str(weights)) == (weights, model)
    assert asked == [("facebook/opt-125m", source._SMALL_FILES)]


def test_a_folder_wins_over_the_hub(hub, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, tmp_path / "someone" / "tiny-opt")
    assert source.find_model("someone/tiny-opt") == (Path("someone/tiny-opt"),) * 2


def test_code_in_a_tokenizer_is_not_run_nor_asked_about(model, tmp_path, monkeypatch):
    folder = tmp_path / "custom"
    shutil.copytree(model, folder)
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'proof')!r}, 'w')\nclass Mine: pass\n")
    config = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("asked the user"))
    with pytest.raises(UserError, match="tokenizer"):
        source.load_tokenizer(folder)
    assert not (tmp_path / "proof").exists()


# random weights


def test_dummy_weights_give_the_same_tokens_for_every_placement(generate, model):
    """Only config.json is read; a tensor's numbers depend on its name, not on where it lies."""
    options = ("--model", model, "--path", "_DUMMY_")
    expected = generate(*options, *percent(ON_GPU))
    assert len({tuple(row["token_ids"]) for row in expected}) > 1
    for six in (ON_CPU, ON_DISK, ("30", "30", "30", "30", "100", "0"), ("50", "0", "50", "0", "0", "0")):
        for overlap in ("--overlap", "--no-overlap"):
            batches = ("--gpu-batch-size", 2, "--num-gpu-batches", 2)
            assert generate(*options, *percent(six), overlap, *batches) == expected


def test_dummy_weights_need_no_weights_and_no_tokenizer(generate, model, texts, tmp_path):
    (tmp_path / "bare").mkdir()
    shutil.copy(model / "config.json", tmp_path / "bare")
    assert generate("--model", tmp_path / "bare", "--path", "_DUMMY_") == generate(
        "--model", model, "--path", "_DUMMY_"
    )
