"""The slots of each KV head are measured once for a model and a rule, and then decide the tokens of a job."""

from __future__ import annotations

import json
import shutil

import pytest
from command_tools import write_model

from h2o_flexgen import LLM, KVBudget, SamplingParams, UserError
from h2o_flexgen.commands.main import main
from h2o_flexgen.kv_cache.layers import HeadLosses
from h2o_flexgen.profiling import calibration, head_slots
from h2o_flexgen.utils.files import cache_folder

pytest_plugins = ["command_tools"]

PROMPT = list(range(5, 85))
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
BUDGET = KVBudget.from_size(16, 16, "h2o")


@pytest.fixture(autouse=True)
def measured(monkeypatch) -> list[str]:
    """The rules that were measured so far, in little time."""
    rules = []
    measure = calibration.measure

    def counted(model, ids, rule, *args):
        rules.append(rule)
        return measure(model, ids, rule, *args)

    monkeypatch.setattr(calibration, "measure", counted)
    monkeypatch.setattr(head_slots, "WINDOW", 128)
    return rules


@pytest.fixture
def windowed(talker, tmp_path):
    """A model with sliding windows in every other layer, and soft caps."""
    folder = shutil.copytree(talker, tmp_path / "gemma2")
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, head_dim=8)
    sizes |= dict(num_key_value_heads=2, vocab_size=300, max_position_embeddings=1280, sliding_window=24)
    return write_model(folder, config=sizes | {"model_type": "gemma2", "attn_logit_softcapping": 5.0})


def generated(model, budget: KVBudget, prompt=PROMPT) -> tuple[list[int], list | None]:
    """Tokens, and the slots of each head."""
    with LLM(str(model), kv_budget=budget, device="cpu", dtype="float32", progress=False) as llm:
        (output,) = llm.generate([prompt], PARAMS)
        return output.outputs[0].token_ids, llm.report["kv_budget"].get("layers")


def kept():
    (path,) = cache_folder("heads").iterdir()
    return path


def test_the_first_job_measures_and_the_others_read(talker, measured):
    tokens, slots = generated(talker, BUDGET)
    assert measured == ["h2o"]
    by_head = [n for layer in slots for n in (layer if isinstance(layer, list) else [layer] * 4)]
    assert len({*by_head}) > 1 and sum(by_head) <= 32 * len(by_head)
    assert (tokens, slots) == generated(talker, BUDGET)
    assert measured == ["h2o"]
    known = HeadLosses.from_dict(json.loads(kept().read_text()))
    assert (known.model, known.rule) == (str(talker), "h2o")


def test_layers_with_a_window_and_a_soft_cap(windowed, measured):
    found = generated(windowed, BUDGET)
    slots = [layer if isinstance(layer, list) else [layer] * 2 for layer in found[1]]
    assert max(slots[0] + slots[2]) <= 23 < max(slots[1] + slots[3])
    assert sum(map(sum, slots)) <= 4 * 23 + 4 * 32
    assert generated(windowed, BUDGET) == found
    assert measured == ["h2o"]


@pytest.mark.parametrize(
    "content", ["{", '{"format": 0}', '{"format": 2, "rule": "mean", "budgets": [1], "losses": []}']
)
def test_what_is_damaged_or_of_another_version_or_model_is_measured_anew(talker, measured, caplog, content):
    expected = generated(talker, BUDGET)
    kept().write_text(content)
    assert generated(talker, BUDGET) == expected
    assert measured == ["h2o", "h2o"] and "it is not used" in caplog.text


def test_each_rule_is_measured_for_itself(talker, measured):
    generated(talker, BUDGET)
    generated(talker, KVBudget.from_size(16, 16, "mean"))
    assert measured == ["h2o", "mean"]


def test_all_heads_get_the_same_where_the_user_says_so(talker, measured):
    assert generated(talker, KVBudget.from_size(16, 16, "h2o:layers=none"))[1] is None
    assert measured == []


def test_a_file_given_by_hand_wins(talker, measured, tmp_path):
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"budgets": [0.1, 0.3], "losses": [[1, 0], [9, 0], [1, 0]]}))
    assert generated(talker, KVBudget.from_size(16, 16, f"h2o:layers={path}"))[1] == [16, 48, 16]
    assert measured == []


@pytest.mark.parametrize("budget", [KVBudget.from_ratio(0.4), KVBudget.from_size(11)])
def test_budgets_out_of_the_measured_range_are_the_same_in_all_heads(talker, measured, budget):
    assert generated(talker, budget)[1] is None
    assert measured == []


def test_with_a_budget_in_slots_a_prompt_does_not_depend_on_its_neighbours(talker):
    with LLM(str(talker), kv_budget=BUDGET, device="cpu", dtype="float32", progress=False) as llm:
        alone, *_ = llm.generate([PROMPT], PARAMS)
        beside, *_ = llm.generate([PROMPT, PROMPT * 3], PARAMS)
    assert alone.outputs[0].token_ids == beside.outputs[0].token_ids


def test_models_without_a_tokenizer_measure_nothing(tiny, measured):
    assert generated(tiny("llama").folder, BUDGET, PROMPT[:20])[1] is None
    assert measured == []


def test_measuring_that_takes_too_long_is_given_up_once(talker, monkeypatch, caplog, measured):
    monkeypatch.setattr(head_slots, "MOST_SECONDS", 0)
    monkeypatch.setattr(head_slots, "MOST_OF_JOB", 0)
    assert generated(talker, BUDGET)[1] is None
    assert "all get the same" in caplog.text
    assert generated(talker, BUDGET)[1] is None
    assert measured == ["h2o"]


def test_a_home_that_cannot_be_used_keeps_nothing(talker, tmp_path, monkeypatch, caplog, measured):
    home = tmp_path / "shared"
    (home / "heads").mkdir(parents=True)
    (home / "heads").chmod(0o777)
    monkeypatch.setenv("H2O_FLEXGEN_HOME", str(home))
    assert generated(talker, BUDGET)[1] is not None
    assert measured == ["h2o"] and "is not kept" in caplog.text


def test_measuring_needs_memory(talker, monkeypatch, caplog, measured):
    monkeypatch.setattr(calibration, "most_bytes", lambda model, rows: 1 << 60)
    assert generated(talker, BUDGET)[1] is None
    assert "too little to measure" in caplog.text and measured == []


def test_a_stream_has_slots_by_head(talker, measured):
    with LLM(str(talker), kv_budget=BUDGET, device="cpu", dtype="float32", progress=False) as llm:
        with llm.session(position_rolling=False) as session:
            session.feed(PROMPT)
        assert len({*map(str, llm.choice.rule.to_dict()["layers"])}) > 1
    assert measured == ["h2o"]


def test_plans_know_what_was_measured(talker, capsys, measured):
    options = f"--model {talker} --prompt-len 80 --gen-len 20 --num-prompts 4 --kv-rule h2o --dtype float32".split()

    def planned(command: str, *budget: str) -> dict:
        capsys.readouterr()
        assert main([command, *options, *budget, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    in_slots = ("--hh-size", "16")
    before = planned("plan", *in_slots)
    assert "layers" not in before["kv_budget"] and measured == []
    _, slots = generated(talker, BUDGET)
    for command in ("plan", "search"):
        found = planned(command, *in_slots)
        assert found["kv_budget"]["layers"] == slots
        assert "layers" not in found["command"] and "by-head" not in found["command"]
        assert found["model"]["kv_bytes_per_sequence"]["job"] < before["model"]["kv_bytes_per_sequence"]["full"]
    assert planned("plan", *in_slots, "--percent", *"0 0 0 0 0 0".split())["kv_budget"]["layers"] == slots
    assert planned("plan", *in_slots, "--gen-len", "1")["kv_budget"] is None
    assert measured == ["h2o"]


def test_a_policy_file_has_the_slots_of_heads_of_its_model(talker, tiny, tmp_path, measured):
    _, slots = generated(talker, BUDGET)
    path = tmp_path / "policy.json"
    options = f"--model {talker} --prompt-len 80 --gen-len 20 --kv-rule h2o --hh-size 16 -o {path}".split()
    assert main(["search", *options]) == 0
    with LLM(str(talker), policy=path, device="cpu", dtype="float32", progress=False) as llm:
        llm.generate([PROMPT], PARAMS)
        assert llm.report["kv_budget"]["layers"] == slots
    other = tiny("gemma2").folder
    with LLM(str(other), policy=path, device="cpu", dtype="float32", progress=False) as llm:
        with pytest.raises(UserError, match="a policy file with slots of KV heads is for one model"):
            llm.generate([PROMPT[:20]], PARAMS)


def test_a_plan_that_sizes_the_budget_shares_it_out(talker, capsys, measured):
    with LLM(str(talker), kv_budget=KVBudget.from_ratio(0.2), dtype="float32", progress=False) as llm:
        llm.generate([PROMPT * 10], PARAMS)
    capsys.readouterr()
    job = f"--model {talker} --prompt-len 800 --gen-len 400 --num-prompts 512"
    options = "--hh-ratio auto --compress-weight auto --gpu-batch-size 512 --percent 100 0 100 0 100 0 --json"
    assert main(["plan", *job.split(), *options.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv_budget"]["layers"]
    assert found["curve"] and len(measured) == 1


@pytest.mark.parametrize("kind", ["talker", "windowed"])
def test_a_resumed_job_keeps_the_slots_it_began_with(kind, request, tmp_path, measured):
    folder = request.getfixturevalue(kind)
    rows = [json.dumps({"prompt_token_ids": [n, *PROMPT]}) for n in range(6)]
    inputs = tmp_path / "rows.jsonl"
    output = tmp_path / "texts.jsonl"
    options = f"--model {folder} --device cpu --dtype float32 --hh-size 16 --kv-rule h2o --gen-len 20 --ignore-eos"

    def run(name: str, count: int) -> list[str]:
        inputs.write_text("\n".join(rows[:count]) + "\n")
        found = tmp_path / name
        assert main(["generate", *options.split(), "--input-file", str(inputs), "--output-file", str(found)]) == 0
        return found.read_text().splitlines()

    whole = run("whole.jsonl", 6)
    run(output.name, 2)
    known = json.loads(kept().read_text())
    alike = [[[0.0] * len(known["budgets"])] * len(layer) for layer in known["losses"]]
    kept().write_text(json.dumps(known | {"losses": alike}))
    assert run(output.name, 6) == whole
    kept().unlink()
    assert run("again.jsonl", 6) == whole
    assert measured == ["h2o", "h2o"]
