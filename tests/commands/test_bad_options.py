"""Numbers, options and policy files that a user can get wrong end in one line with a remedy."""

from __future__ import annotations

import pytest
from command_tools import ON_GPU, SHORT, percent, write_prompts

from h2o_flexgen.commands.generate import make_parser
from h2o_flexgen.policy import Policy

pytest_plugins = ["command_tools"]


@pytest.mark.parametrize(
    "numbers, message",
    [
        (("60", "50", "100", "0", "100", "0"), "together at most 100"),
        (("-1", "0", "100", "0", "100", "0"), "0 or more"),
        (("100", "0", "100", "0", "inf", "0"), "0 or more"),
        (("100", "0", "100", "0", "100"), "six numbers"),
        (("100", "0", "100", "0", "100", "0", "0"), "unexpected"),
        (("a", "0", "100", "0", "100", "0"), "invalid float"),
    ],
)
def test_percentages(refused, model, numbers, message):
    assert message in refused("--model", model, *SHORT, "--percent", *numbers)


@pytest.mark.parametrize(
    "option, value",
    [
        ("--gen-len", "0"),
        ("--prompt-len", "-1"),
        ("--num-prompts", "1.5"),
        ("--gpu-batch-size", ""),
        ("--num-gpu-batches", "1e3"),
    ],
)
def test_sizes(refused, model, option, value):
    assert option in refused("--model", model, option, value)


@pytest.mark.parametrize(
    "option, value", [("--mem", "0"), ("--gpu-mem", "-1"), ("--cpu-mem", "nan"), ("--disk-mem", "inf")]
)
def test_memory_caps(refused, model, option, value):
    assert option in refused("--model", model, *SHORT, option, value)


@pytest.mark.parametrize(
    "option, value",
    [
        ("--hh-ratio", "1.1"),
        ("--recent-ratio", "20"),
        ("--hh-size", "2.5"),
        ("--recent-size", "x"),
        ("--temperature", "-1"),
        ("--top-k", "0.5"),
        ("--top-p", "0"),
        ("--top-p", "nan"),
        ("--seed", "-1"),
        ("--seed", str(1 << 200)),
    ],
)
def test_other_numbers(refused, model, option, value):
    message = refused("--model", model, *SHORT, option, value)
    assert option.strip("-").replace("-", "_") in message.replace("-", "_")


@pytest.mark.parametrize(
    "options",
    [
        ("--hh-size", "0", "--recent-size", "0"),
        ("--hh-ratio", "0"),
        ("--hh-ratio", "0", "--recent-size", "0"),
    ],
)
def test_an_empty_budget(refused, model, options):
    assert "budget is empty" in refused("--model", model, *SHORT, *options)


def test_an_unknown_cache_rule_or_one_without_a_budget(refused, model, tmp_path):
    assert "unknown --kv-rule 'full'; known: h2o" in refused(
        "--model", model, *SHORT, "--hh-ratio", 0.2, "--kv-rule", "full"
    )
    assert "give one too, such as --hh-ratio" in refused("--model", model, *SHORT, "--kv-rule", "h2o")
    policy = tmp_path / "policy.json"
    policy.write_text('{"policy": {}, "kv_budget": {"heavy": 2, "recent": 2, "rule": "best"}}')
    assert "unknown --kv-rule 'best'; known: h2o" in refused("--model", model, *SHORT, "--policy", policy)


@pytest.mark.parametrize("option, value", [("--device", "tpu"), ("--device", "meta"), ("--device", "cuda:99")])
def test_a_missing_device(refused, model, option, value):
    assert "device" in refused("--model", model, *SHORT, option, value)


def test_an_unknown_dtype(refused, model):
    assert "float16" in refused("--model", model, *SHORT, "--dtype", "int8")


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--hh-ration", "0.2"), "unknown option --hh-ration: did you mean --hh-ratio?"),
        (("--gen_len=3",), "unknown option --gen_len: did you mean --gen-len?"),
        (("--max-tokens", "3"), "unknown option --max-tokens: did you mean --gen-len?"),
        (("--batch-size", "3"), "unknown option --batch-size: did you mean --gpu-batch-size?"),
        (("--zzz",), "unknown option --zzz (h2o-flexgen generate --help lists the options)"),
        (("word",), "unexpected 'word', which belongs to no option"),
        (("--gpu-mem", "0"), "--gpu-mem: must be more than 0, not 0; it means: use at most this much GPU memory"),
        (("--percent", "1", "2", "3", "4", "5"), "it means: no search, but six numbers: percent of weights gpu cpu"),
        (("--hh-ratio", "20"), "--hh-ratio must lie in [0, 1], not 20.0: for 20 % give 0.2"),
        (("--device", "cuda"), "leave --device out to compute on the CPU"),
        (("--gpu-mem", "0.01"), "raise --mem (or --gpu-mem) if you gave it"),
        (("--input-file", "nowhere.jsonl"), "cannot read --input-file nowhere.jsonl: No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_messages_lead_to_a_job_that_runs(refused, model, argv, message):
    assert message in refused("--model", model, *argv)


@pytest.mark.parametrize("prompt_len, gen_len", [("60", "5"), ("65", "1"), ("1", str(10**12))])
def test_a_job_longer_than_the_positions(refused, model, prompt_len, gen_len):
    message = refused("--model", model, "--prompt-len", prompt_len, "--gen-len", gen_len)
    assert "64 positions" in message


def test_as_long_as_the_positions_is_fine(cli, model, tmp_path):
    code, _, err = cli("--model", model, "--prompt-len", 60, "--gen-len", 4, "--num-prompts", 1, "--ignore-eos")
    assert code == 0, err


def test_contradictory_options(refused, model, tmp_path):
    policy = tmp_path / "policy.json"
    policy.write_text(Policy().to_json())
    rows = write_prompts(tmp_path / "in.jsonl")
    six = percent(ON_GPU)
    for argv in (
        (*six, "--policy", "auto"),
        (*six, "--policy", policy),
        ("--gpu-batch-size", "2", "--policy", policy),
        ("--num-gpu-batches", "2", "--policy", policy),
        ("--no-overlap", "--policy", policy),
        ("--overlap", "--policy", policy),
        ("--cpu-cache-compute", "--policy", policy),
        ("--input-file", rows, "--prompt-len", "8"),
        ("--input-file", rows, "--num-prompts", "8"),
    ):
        message = refused("--model", model, *argv)
        assert argv[0] in message or argv[-2] in message


@pytest.mark.parametrize(
    "pair", [("--output-file", "--report"), ("--input-file", "--output-file"), ("--input-file", "--report")]
)
def test_one_file_for_two_things(refused, model, tmp_path, pair):
    rows = write_prompts(tmp_path / "rows.jsonl")
    (tmp_path / "link").symlink_to(rows)
    before = rows.read_text()
    message = refused("--model", model, pair[0], rows, pair[1], tmp_path / "link", files=False)
    assert pair[0] in message and pair[1] in message
    assert rows.read_text() == before


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "cannot read"),
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "JSON object"),
        (b'{"gpu_batch_size": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"policy": 5}', "JSON object"),
        (b'{"gpu_batch_sise": 4}', "gpu_batch_sise"),
        (b'{"gpu_batch_size": 0}', "gpu_batch_size"),
        (b'{"gpu_batch_size": true}', "gpu_batch_size"),
        (b'{"num_gpu_batches": null}', "num_gpu_batches"),
        (b'{"overlap": "yes"}', "overlap"),
        (b'{"percent": [100, 0, 100, 0, 100]}', "six"),
        (b'{"percent": [100, 0, 100, 0, 100, "0"]}', "percent"),
        (b'{"percent": [100, 0, 100, 0, 100, NaN]}', "percent"),
        (b'{"percent": [100, 50, 100, 0, 100, 0]}', "together at most 100"),
    ],
)
def test_policy_files(refused, model, tmp_path, text, message):
    path = tmp_path / "policy.json"
    if text is not None:
        path.write_bytes(text)
    refusal = refused("--model", model, *SHORT, "--policy", path)
    assert message in refusal and "policy.json" in refusal


def test_arguments_in_messages_become_options():
    named = make_parser("x").name_options("`gpu_mem` and `dtype`, not `kv_budget`; gpu_mem without backticks; `x y`")
    assert named == "--gpu-mem and --dtype, not kv_budget; gpu_mem without backticks; `x y`"
