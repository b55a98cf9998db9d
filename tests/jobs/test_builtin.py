"""Built-in prompts, and the workload of a job without an input file."""

from __future__ import annotations

import json

import pytest
from cli_tools import ON_DISK, ON_GPU, percent

from h2o_flexgen.jobs.builtin import builtin_prompts
from h2o_flexgen.models.source import load_tokenizer

pytest_plugins = ["cli_tools"]


@pytest.mark.parametrize("length", [1, 2, 3, 17, 512, 2048, 20_000])
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
    prompts = builtin_prompts(tokenizer, 300, 120, 64)
    assert len(prompts) == 120 and all(len(ids) == 64 for ids in prompts)
    assert len({tuple(ids) for ids in prompts}) == 120
    assert builtin_prompts(tokenizer, 300, 120, 64) == prompts


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
