"""`quality`: its table and files, what it refuses before it runs, and how other commands use its file."""

from __future__ import annotations

import json
import signal
import sys

import pytest
from command_tools import FP32, last_line, write_rows
from machines import laptop

from h2o_flexgen import LLM
from h2o_flexgen.commands.main import main

pytest_plugins = ["command_tools"]

TEXT = "The page cache keeps what was read from a disk in memory, so that it need not be read again. " * 20
LENGTHS = ("--prompt-len", 40, "--gen-len", 8, "--windows", 2)


@pytest.fixture
def measured(talker, tmp_path, capfd):
    """Run the command with the tiny model: (exit code, stdout, stderr)."""
    (tmp_path / "text.txt").write_text(TEXT)

    def run(*argv, model=talker) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(["quality", *map(str, ("--model", model, *FP32, *argv))])
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def text(tmp_path):
    return tmp_path / "text.txt"


def test_a_row_for_the_full_cache_and_each_rule_with_each_budget(measured, text, tmp_path):
    output = tmp_path / "quality.json"
    rules = ("--kv-rule", "h2o", "--kv-rule", "sinks:first=2")
    code, out, err = measured(text, *LENGTHS, *rules, "--ratios", 0.2, 0.5, "-o", output)
    assert code == 0, err
    data = json.loads(output.read_text())
    assert [(row["rule"], row["slots"]) for row in data["rows"]] == [
        ("full", None),
        *((rule, slots) for rule in ("h2o", "sinks:first=2") for slots in (8, 20)),
    ]
    assert data["workload"]["texts"] == ["text.txt"] and data["workload"]["passages"] == 2
    assert {"command", "date", "machine", "versions"} <= data.keys()
    assert "quality --model" in data["command"] and "sinks:first=2" in data["command"]
    lines = out.splitlines()
    assert "2 passage(s) of text.txt" in lines[0] and lines[2].split()[0] == "rule" and len(lines) == 8
    assert "4 + 4" in lines[4] and "10 + 10" in lines[5]


def test_without_files_the_text_is_built_in(measured):
    code, out, err = measured(*LENGTHS, "--kv-rule", "mean", "--sizes", 8)
    assert code == 0, err
    assert "2 passage(s) of Python's language reference" in out


def test_rows_that_cannot_be_measured_stop_no_others(measured, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a b c", "completion": " d e f"}, {"x": 1}, "{"])
    code, out, err = measured(rows, *LENGTHS, "--kv-rule", "h2o", "--sizes", 4)
    assert code == 0, err
    assert "2 rows cannot be measured; " in err and "rows.jsonl line 2: no texts" in err
    assert "1 passage(s) of rows.jsonl" in out


def test_the_frontier_is_drawn(measured, text, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "frontier.png"
    formats = ("--compress-cache", "none", "int4")
    code, _, err = measured(text, *LENGTHS, "--ratios", 0.2, 0.5, *formats, "--plot", plot)
    assert code == 0, err
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_each_format_of_the_cache_with_each_budget_and_the_full_cache(measured, text, cli, talker, tmp_path):
    output, report = (tmp_path / name for name in ("quality.json", "report.json"))
    formats = ("--compress-cache", "none", "int8", "int4")
    code, out, err = measured(text, *LENGTHS, *formats, "--kv-rule", "smoothed", "--sizes", 20, "-o", output)
    assert code == 0, err
    rows = json.loads(output.read_text())["rows"]
    kept = [(row["compress_cache"], row["slots"]) for row in rows]
    assert kept == [(None, None), *((k, None) for k in ("int8", "int4")), *((k, 20) for k in (None, "int8", "int4"))]
    sizes = [row["kv_bytes"] for row in rows]
    assert sizes[2] < sizes[1] < sizes[0] and sizes[5] < sizes[4] < sizes[3] < sizes[0]
    assert "full int4" in out and "smoothed int8" in out
    chosen = ("--max-loss", 0.9, "--quality", output, "--compress-cache", "auto", "--report", report)
    code, _, err = cli("--model", talker, *FP32, *JOB, *chosen)
    assert code == 0, err
    found = json.loads(report.read_text())
    assert found["compress_cache"] == "int4" and found["kv_budget"]["rule"] == "smoothed"
    assert "20 heavy" not in err and "in int4 (" in err


def test_summaries(measured, tmp_path):
    pytest.importorskip("rouge")
    pytest.importorskip("rouge_score")
    rows = [{"article": TEXT[:300] + "Summary:", "summary_gt": "It keeps what was read."}]
    source = write_rows(tmp_path / "articles.jsonl", rows)
    options = ("--task", "summarize", "--gen-len", 10, "--sizes", 8, 16, "-o", tmp_path / "q.json")
    code, out, err = measured(source, *options)
    assert code == 0, err
    assert "rouge 1" in out and "rouge-score L" in out
    assert [line.split()[0] for line in out.splitlines()[3:]] == ["full", *["voted"] * 4]
    rows = json.loads((tmp_path / "q.json").read_text())["rows"]
    assert set(rows[1]["rouge"]["reference"]) == {"rouge", "rouge-score"}


@pytest.mark.parametrize(
    "task, columns",
    [
        ("needle", ["asked behind", "asked in front", "of 5, the first", "of 5, the others"]),
        ("copy", ["copied", "tokens right"]),
        ("choice", ["right"]),
        ("lengths", ["tokens, asked behind", "tokens, asked in front"]),
    ],
)
def test_tasks(measured, text, tmp_path, task, columns):
    output = tmp_path / "q.json"
    gen_len = () if task == "needle" else ("--gen-len", 6)
    given = ("--task", task, "--prompt-len", 420, "--windows", 1, *gen_len, "--kv-rule", "h2o", "--sizes", 40)
    code, out, err = measured(text, *given, "-o", output)
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["rule", "full", "h2o"]
    assert all(column in out for column in columns) and "±" in out
    data = json.loads(output.read_text())
    assert data["workload"]["task"] == task and data["workload"]["passages"] == 1
    for row in data["rows"]:
        assert list(row["scores"]) == columns
        assert all(score["mean"] >= 0 for score in row["scores"].values())


def test_texts_side_by_side(measured, text):
    text.write_text(TEXT[:100])
    for prompt in (TEXT[:200], text):
        code, out, err = measured("--compare", prompt, "--gen-len", 6, "--sizes", 8)
        assert code == 0, err
        heads = [line.split(",")[0] for line in out.splitlines() if line.startswith("--- ")]
        assert heads == ["--- full", "--- voted", "--- recent"]


REFUSED = {
    "no file": (("nowhere.txt",), "cannot read nowhere.txt: No such file"),
    "unknown rule": (("--kv-rule", "h3o"), "unknown --kv-rule 'h3o'; known: h2o, "),
    "unknown option of a rule": (("--kv-rule", "h2o:last=x"), "--kv-rule h2o: cannot take the option 'last=x'"),
    "ratio": (("--ratios", "20"), "each of --ratios must lie in (0, 1], not 20"),
    "no number": (("--ratios", "a"), "--ratios: invalid float value: 'a'; it means: KV budgets as fractions"),
    "size": (("--sizes", "0"), "each of --sizes must be 1 or more"),
    "share": (("--hh-share", "2"), "--hh-share must lie in [0, 1], not 2"),
    "too few slots": (("--kv-rule", "sinks:first=30", "--sizes", "8"), "protect"),
    "folder of the output": (("-o", "nowhere/q.json"), "--output nowhere/q.json: the folder"),
    "one file twice": (("-o", "same", "--plot", "same"), "--output and --plot name the same file"),
    "plot of summaries": (("--task", "summarize", "a.jsonl", "--plot", "a.png"), "--plot draws perplexities"),
    "summaries of nothing": (("--task", "summarize"), "needs a file of JSON lines"),
    "files beside a prompt": (("a.txt", "--compare", "b"), "--compare brings its own text"),
    "samples": (("--samples", "3"), "--samples is for --compare"),
    "answers of a needle": (("--task", "needle", "--gen-len", "4"), "leave --gen-len out"),
    "no room": (("--task", "copy", "--prompt-len", "30"), "--prompt-len 30 leaves no room for a text"),
    "one token": (("--gen-len", "1"), "--gen-len must be 2 or more"),
    "windows of a prompt": (("--compare", "b"), "--prompt-len and --windows cut texts into passages"),
    "temperature of nothing": (("--temperature", "1"), "--temperature is for --samples"),
    "two tasks": (("--compare", "b", "--task", "summarize"), "leave --task out"),
    "one sample": (("--samples", "1", "--compare", "b"), "2 or more"),
    "unknown option": (("--rules", "h2o"), "unknown option --rules"),
}


@pytest.mark.parametrize("options, message", REFUSED.values(), ids=REFUSED)
def test_bad_options_are_refused_before_anything_runs(measured, monkeypatch, tmp_path, options, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LLM, "score", lambda *a: pytest.fail("it ran"))
    code, out, err = measured(*LENGTHS, *options)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


@pytest.mark.parametrize(
    "content, message",
    [
        (b"short", "text.txt has 4 tokens, too few for a prompt of 40 and 8 behind it: --prompt-len"),
        (b"\x89PNG\x00\xff", "text.txt is not a text in UTF-8"),
        (b"a\0b", "text.txt is not a text in UTF-8"),
        (b"", "text.txt has 0 tokens, too few for a prompt of 40 and 8 behind it"),
    ],
)
def test_texts_that_cannot_be_used(measured, text, content, message):
    text.write_bytes(content)
    code, out, err = measured(text, *LENGTHS)
    assert code == 2 and out == "" and message in err, err


def test_a_model_with_too_few_positions_or_no_tokenizer(measured, text, model):
    code, _, err = measured(text, "--prompt-len", 1000, "--gen-len", 300)
    assert code == 2 and "longer than the model's 1280 positions" in err
    code, _, err = measured(text, *LENGTHS, model=model)
    assert code == 2 and "no tokenizer" in err


def test_a_text_is_not_overwritten(measured, text):
    code, _, err = measured(text, *LENGTHS, "-o", text)
    assert code == 2 and "name the same file" in err and text.read_text() == TEXT


@pytest.mark.parametrize(
    "package, options",
    [
        ("matplotlib", ("--plot", "a.png")),
        ("rouge", ("--task", "summarize", "rows.jsonl")),
        ("sacrebleu", ("--compare", "a", "--samples", "2")),
    ],
)
def test_a_package_that_is_missing_is_named(measured, monkeypatch, package, options):
    monkeypatch.setitem(sys.modules, package, None)
    code, _, err = measured(*options)
    assert code == 2 and f"needs the package {package}: pip install {package}" in err


def test_ctrl_c_keeps_what_was_measured(measured, text, tmp_path, monkeypatch):
    output = tmp_path / "quality.json"
    score = LLM.score
    calls = []

    def interrupted(*args, **options):
        calls.append(args)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return score(*args, **options)

    monkeypatch.setattr(LLM, "score", interrupted)
    code, out, err = measured(text, *LENGTHS, "-o", output)
    assert code == 130, err
    assert [row["rule"] for row in json.loads(output.read_text())["rows"]] == ["full", "voted"]
    assert "full" in out and last_line(err) == "interrupted"


# how other commands use the file


@pytest.fixture
def losses(talker, tmp_path):
    """write(...) -> the path of a file of losses."""

    def write(model=str(talker), rows=None, **workload):
        path = tmp_path / "losses.json"
        common = {"prompt_len": 40, "gen_len": 40, "hh_share": 0.5, "model": model} | workload
        made = [
            dict(rule="full", slots=None, rise=0.0, kv_bytes=1000),
            dict(rule="voted", slots=8, hh_ratio=0.1, recent_ratio=0.1, rise=0.3, kv_bytes=100),
            dict(rule="mean", slots=20, hh_ratio=0.25, recent_ratio=0.25, rise=0.1, kv_bytes=250),
            dict(rule="voted", slots=32, hh_ratio=0.4, recent_ratio=0.4, rise=0.02, kv_bytes=400),
        ]
        path.write_text(json.dumps({"workload": common, "rows": rows or made}))
        return path

    return write


JOB = ("--prompt-len", 40, "--gen-len", 4, "--num-prompts", 2)


def test_generate_and_plan_take_the_cheapest_within_the_limit(cli, talker, losses, tmp_path, capfd):
    report = tmp_path / "report.json"
    given = ("--max-loss", 0.15, "--quality", losses())
    code, _, err = cli("--model", talker, *FP32, *JOB, *given, "--report", report)
    assert code == 0, err
    assert json.loads(report.read_text())["kv_budget"] == {"heavy": 10, "recent": 10, "rule": "mean"}
    says = "KV budget  mean with 0.25 heavy + 0.25 recent of the longest prompt (+10.0% perplexity): the cheapest in "
    assert says in err and "warning" not in err
    code = main(["plan", *map(str, (talker, *FP32, *JOB, *given, "--json"))])
    out, err = capfd.readouterr()
    assert code == 0 and says in err
    assert json.loads(out)["kv_budget"] == {"heavy": 10, "recent": 10, "rule": "mean"}


def test_a_file_of_another_model_is_a_warning(cli, talker, losses):
    code, _, err = cli("--model", talker, *FP32, *JOB, "--max-loss", 0.15, "--quality", losses("another"))
    assert code == 0 and f"losses.json is of another, this job is of {talker}" in err


def test_a_file_of_other_weights_is_a_warning(talker, losses, capfd):
    given = ("--max-loss", 0.15, "--quality", losses(), "--compress-weight", "int8", "--json")
    code = main(["plan", *map(str, (talker, *FP32, *JOB, *given))])
    warning = "is of weights as stored and exact matmuls, this job is of weights in int8 and exact matmuls"
    assert code == 0 and warning in capfd.readouterr().err


@pytest.mark.parametrize(
    "options, message",
    [
        (("--max-loss", 0.1), "give a --quality FILE too"),
        (("--quality", "FILE"), "--quality is for --max-loss and for --hh-ratio auto"),
        (("--max-loss", 0.1, "--quality", "FILE", "--hh-size", 4), "leave --kv-rule, ratios and sizes out"),
        (("--max-loss", 0.1, "--quality", "FILE", "--kv-rule", "h2o"), "leave --kv-rule, ratios and sizes out"),
        (("--max-loss", 2, "--quality", "FILE"), "--max-loss must lie in [0, 1), not 2: for 2 % give 0.02"),
        (("--max-loss", 0.01, "--quality", "FILE"), "costs at most 0.01, the best is voted with 0.4 heavy"),
        (("--max-loss", 0.01, "--quality", "nowhere.json"), "cannot read --quality nowhere.json"),
    ],
)
def test_contradictions(cli, talker, losses, options, message):
    path = losses()
    code, _, err = cli("--model", talker, *JOB, *(path if o == "FILE" else o for o in options))
    assert code == 2 and message in err, err


def test_an_automatic_budget_stays_within_the_limit(cli, talker, losses, tmp_path):
    hardware = tmp_path / "laptop.json"
    report = tmp_path / "report.json"
    hardware.write_text(laptop(dtype="float32").to_json())
    auto = ("--model", talker, *FP32, *JOB, "--hh-ratio", "auto", "--hardware", hardware, "--report", report)
    code, _, err = cli(*auto, "--quality", losses())
    assert code == 0, err
    curve = [line.split() for line in err.splitlines() if "%" in line or "unknown" in line]
    assert curve[-1][-1] == "+0.0%" and "+30.0%" in err and "loss" in err
    code, _, err = cli(*auto, "--quality", losses(), "--max-loss", 0.05)
    assert code == 0, err
    budget = json.loads(report.read_text())["kv_budget"]
    assert budget is None or budget["heavy"] + budget["recent"] >= 0.7 * 40
    code, _, err = cli(*auto, "--quality", losses(rows=[dict(rule="full", slots=None)]))
    assert code == 2 and "has no budget of rule voted" in err
