"""Input files: any text can be a row, and a bad row does not affect the others. Built-in prompts."""

from __future__ import annotations

import json
import sys

import pytest
from command_tools import FP32, ON_DISK, ON_GPU, PROMPTS, percent, read_rows, write_rows

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.input import builtin_prompts
from h2o_flexgen.models.tokenizer import load_tokenizer
from h2o_flexgen.utils.texts import builtin_text

pytest_plugins = ["command_tools"]


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
    """Unicode's line separators inside a text do not end its row; blank lines are ignored; half a surrogate pair is an
    error of its row only."""
    prompts = ["a\u2028b", "a\x85b", "a\u000bb\u000cc", "a\rb", "nul \x00", "\ufeffx", "\ud83d\ude00", "x" * 10]
    lines = [json.dumps({"prompt": p}, ensure_ascii=False).encode("utf-8", "surrogatepass") for p in prompts[:6]]
    lines += [json.dumps({"prompt": p}).encode() for p in prompts[6:]]
    lines += [b"", b"   ", json.dumps({"prompt": "half \ud800 a pair"}).encode()]
    rows = tmp_path / "in.jsonl"
    out = tmp_path / "out.jsonl"
    rows.write_bytes(b"\r\n".join(lines))
    code, _, err = cli("--model", texts, *FP32, "--gen-len", 2, "--input-file", rows, "--output-file", out)
    assert code == 0, err
    found = read_rows(out)
    assert len(found) == 9
    assert all("token_ids" in row for row in found[:8])
    assert set(found[8]) == {"index", "error"}


def test_a_byte_order_mark_is_no_error(cli, model, tmp_path):
    rows = tmp_path / "in.jsonl"
    out = tmp_path / "out.jsonl"
    rows.write_bytes(b'\xef\xbb\xbf{"prompt_token_ids": [5]}\n')
    code, _, err = cli("--model", model, *FP32, "--gen-len", 2, "--input-file", rows, "--output-file", out)
    assert code == 0, err
    assert "token_ids" in read_rows(out)[0]


@pytest.mark.parametrize(
    "content", [b"", b"\n \n\n", b"\xff\xfe\n", b"\x00\x1f\x8b" * 999], ids="empty blank UTF-16 binary".split()
)
def test_an_input_file_without_prompts(refused, model, tmp_path, content):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    assert "--input-file" in refused("--model", model, "--input-file", path)


def test_a_missing_input_file(refused, model, tmp_path):
    assert "--input-file" in refused("--model", model, "--input-file", tmp_path / "none.jsonl")
    assert "--input-file" in refused("--model", model, "--input-file", tmp_path)


#: rows that cannot be run, and a word of the error each gets
BAD_ROWS = [
    ('{"prompt_token_ids": [1, 2', "not JSON"),
    ("garbage", "not JSON"),
    ("[" * 100_000, "not JSON"),
    ('{"prompt_token_ids": [' + "9" * 5000 + "]}", "not JSON"),
    ("[1, 2, 3]", "object"),
    ("5", "object"),
    ("null", "object"),
    ('"text"', "object"),
    ("{}", "messages"),
    ('{"text": "hello"}', "prompt"),
    ('{"prompt_token_ids": []}', "empty"),
    ('{"prompt_token_ids": "1 2"}', "list"),
    ('{"prompt_token_ids": 5}', "list"),
    ('{"prompt_token_ids": null}', "messages"),
    ('{"prompt_token_ids": {"1": 2}}', "list"),
    ('{"prompt_token_ids": [128]}', "vocabulary"),
    ('{"prompt_token_ids": [-1]}', "vocabulary"),
    ('{"prompt_token_ids": [3, 100000000000000000000]}', "vocabulary"),
    ('{"prompt_token_ids": [true]}', "whole numbers"),
    ('{"prompt_token_ids": [5.0]}', "whole numbers"),
    ('{"prompt_token_ids": [NaN]}', "whole numbers"),
    ('{"prompt_token_ids": ["5"]}', "whole numbers"),
    ('{"prompt_token_ids": [null]}', "whole numbers"),
    ('{"prompt_token_ids": [[5]]}', "whole numbers"),
    (json.dumps({"prompt_token_ids": [5] * 60}), "64 positions"),
    ('{"prompt": "text, and no tokenizer"}', "tokenizer"),
    ('{"prompt": ""}', "tokenizer"),
    ('{"prompt": 5}', "text"),
    ('{"messages": [{"role": "user", "content": "text, and no tokenizer"}]}', "tokenizer"),
    ('{"messages": []}', "empty"),
    ('{"messages": [5, 6, 7]}', "list of objects"),
    ('{"prompt_token_ids": [5], "temperature": "hot"}', "temperature"),
    ('{"prompt_token_ids": [5], "temperature": 1' + "0" * 400 + "}", "temperature"),
    ('{"prompt_token_ids": [5], "top_p": NaN}', "top_p"),
    ('{"prompt_token_ids": [5], "max_tokens": true}', "max_tokens"),
    ('{"prompt_token_ids": [5], "max_tokens": 1000}', "64 positions"),
    ('{"prompt_token_ids": [5], "stop": "a"}', "tokenizer"),
    ('{"prompt_token_ids": [5], "stop": [""]}', "stop"),
    ('{"prompt_token_ids": [5], "custom_id": 7}', "custom_id"),
    ('{"prompt_token_ids": [5], "logprobs": 5}', "logprobs must be true or false"),
]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_bad_rows_among_good_ones(cli, model, tmp_path, sampled):
    """A bad row gets its error; the outputs of the good rows are as if the bad ones had been good."""
    sampling = ("--temperature", "1.0", "--seed", "7") if sampled else ()
    options = ("--model", model, "--hh-ratio", "0.4", *sampling)
    rows = []
    good = []
    bad = []
    for n, (row, say) in enumerate(BAD_ROWS):
        bad.append((len(rows), say))
        rows.append(row)
        if n % 9 == 2:
            good.append(len(rows))
            rows.append({"prompt_token_ids": PROMPTS[n // 9]})
    assert len(good) == len(PROMPTS)
    source = write_rows(tmp_path / "rows.jsonl", rows)
    target = tmp_path / "out.jsonl"
    files = ("--input-file", source, "--output-file", target, "--offload-dir", tmp_path / "offload")
    code, out, err = cli(*FP32, *options, *files, "--gen-len", 6)
    assert code == 0, err
    found = read_rows(target)
    assert [row["index"] for row in found] == list(range(len(rows)))
    for index, say in bad:
        assert set(found[index]) == {"index", "error"}
        assert say in found[index]["error"], rows[index]
        assert "\n" not in found[index]["error"] and len(found[index]["error"]) < 300
    whole = [row if n in good else {"prompt_token_ids": PROMPTS[0]} for n, row in enumerate(rows)]
    source = write_rows(tmp_path / "whole.jsonl", whole)
    files = ("--input-file", source, "--output-file", target, "--offload-dir", tmp_path / "offload", "--restart")
    assert cli(*FP32, *options, *files, "--gen-len", 6)[0] == 0
    expected = read_rows(target)
    for index in good:
        assert found[index] == expected[index]
    assert f"{len(bad)} rows could not be run" in err
    assert "5 prompts" in out


def test_a_row_that_is_not_utf_8(cli, model, tmp_path):
    good = json.dumps({"prompt_token_ids": PROMPTS[0]}).encode()
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([good, '{"prompt": "déjà vu"}'.encode("latin-1"), good]))
    files = ("--input-file", tmp_path / "in.jsonl", "--output-file", tmp_path / "out.jsonl")
    code, _, err = cli("--model", model, *FP32, *files, "--gen-len", 2)
    assert code == 0, err
    rows = read_rows(tmp_path / "out.jsonl")
    assert rows[1]["error"].startswith("not JSON: 'utf-8' codec")
    assert rows[0]["token_ids"] == rows[2]["token_ids"] and len(rows) == 3


@pytest.mark.parametrize("row, say", [BAD_ROWS[0], BAD_ROWS[8], BAD_ROWS[10], BAD_ROWS[15], BAD_ROWS[24], BAD_ROWS[25]])
def test_nothing_but_bad_rows(refused, model, tmp_path, row, say):
    message = refused("--model", model, "--gen-len", "6", "--input-file", write_rows(tmp_path / "in.jsonl", [row] * 3))
    assert "none of the 3 rows" in message and say in message


def test_bad_prompts_in_python(model):
    bad = [[], "", [128], [-1], [True], [2.0], 5, None, [5] * 64, "text"]
    with LLM(str(model), device="cpu", progress=False) as llm:
        for prompt in bad:
            with pytest.raises(UserError, match="prompt 1: "):
                llm.generate([[5], prompt], SamplingParams(max_tokens=2))
        good, *skipped = llm.generate([[7], *bad], SamplingParams(max_tokens=2), skip_errors=True)
    assert good.error is None and good.outputs[0].token_ids
    assert len(skipped) == len(bad) and all(output.error and not output.outputs for output in skipped)


def test_rows_that_set_their_own_sampling(cli, model, tmp_path):
    """The command's options apply to what a row does not set; unknown keys are no error."""
    rows = [
        {"prompt_token_ids": [5, 6, 7], "label": "a"},
        {"prompt_token_ids": [5, 6, 7], "max_tokens": 2, "temperature": None, "logprobs": True},
        {"prompt_token_ids": [5, 6, 7], "custom_id": "drawn", "temperature": 1.5, "seed": 3, "top_k": 50},
    ]
    files = ("--input-file", write_rows(tmp_path / "in.jsonl", rows), "--output-file", tmp_path / "out.jsonl")
    code, _, err = cli("--model", model, *FP32, *files, "--gen-len", 8, "--ignore-eos")
    assert code == 0, err
    greedy, short, drawn = read_rows(tmp_path / "out.jsonl")
    assert len(greedy["token_ids"]) == 8 and short["token_ids"] == greedy["token_ids"][:2]
    assert len(short["logprobs"]) == 2 and max(short["logprobs"]) < 0 and "logprobs" not in greedy
    assert drawn["custom_id"] == "drawn" and drawn["token_ids"] != greedy["token_ids"]


def test_a_duplicate_custom_id(refused, model, tmp_path):
    row = '{"custom_id": "a", "prompt_token_ids": [5]}'
    path = write_rows(tmp_path / "in.jsonl", [row, "", '{"prompt_token_ids": [5]}', row])
    message = refused("--model", model, "--input-file", path)
    assert message.endswith("lines 1 and 4 have the same custom_id 'a'")


def test_a_line_of_a_megabyte_is_one_bad_row(cli, texts, tmp_path):
    rows = [{"prompt": "word " * 200_000}, '{"prompt": "' + "x" * 1_000_000, {"prompt": "short"}]
    files = ("--input-file", write_rows(tmp_path / "in.jsonl", rows), "--output-file", tmp_path / "out.jsonl")
    code, _, err = cli("--model", texts, *FP32, *files, "--gen-len", 2)
    assert code == 0, err
    long, broken, good = read_rows(tmp_path / "out.jsonl")
    assert "64 positions" in long["error"] and broken["error"].startswith("not JSON") and good["token_ids"]
    assert (tmp_path / "out.jsonl").stat().st_size < 1000 and len(err) < 2000


# built-in prompts


@pytest.mark.parametrize("length", [1, 2, 17, 2048, 20_000])
def test_builtin_prompts_have_exactly_the_length(texts, model, length):
    for folder in (texts, model):
        prompts = builtin_prompts(load_tokenizer(folder), 300, 5, length)
        assert [len(ids) for ids in prompts] == [length] * 5
        assert all(type(t) is int and 0 <= t < 300 for ids in prompts for t in ids)
        if folder == texts:
            assert all(ids[0] == 2 for ids in prompts)
            assert all(2 not in ids[1:] for ids in prompts)


def test_builtin_prompts_are_many_and_differ(texts):
    tokenizer = load_tokenizer(texts)
    prompts = builtin_prompts(tokenizer, 300, 1024, 512)
    assert len(prompts) == 1024 and all(len(ids) == 512 for ids in prompts)
    assert len({tuple(ids) for ids in prompts}) == 1024
    assert builtin_prompts(tokenizer, 300, 1024, 512) == prompts


def test_builtin_prompts_wrap_around_at_the_end_of_their_text(texts, monkeypatch):
    monkeypatch.setattr("h2o_flexgen.jobs.input.builtin_text", lambda: "One sentence. And another one!")
    tokenizer = load_tokenizer(texts)
    prompts = builtin_prompts(tokenizer, 300, 3, 100)
    assert len({tuple(ids) for ids in prompts}) == 3
    for ids in prompts:
        assert tokenizer.decode(ids[1:]) in "One sentence. And another one!" * 10


def test_the_builtin_text_is_english():
    text = builtin_text()
    assert len(text) > 300_000 and builtin_text() == text
    assert text.count(" the ") > 2000 and "\ufffd" not in text


def test_a_python_without_the_builtin_text(refused, texts, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert "give an --input-file" in refused("--model", texts)


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
