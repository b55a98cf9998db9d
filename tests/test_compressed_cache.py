"""A cache in 8 or 4 bits gives the tokens of an oracle that rounds the same values, wherever the cache is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import zoo
from command_tools import FP32, write_prompts
from machines import laptop, planner_of
from oracle import IN_SHORT

from h2o_flexgen import LLM, KVBudget, Losses, Policy, SamplingParams, UserError
from h2o_flexgen.commands.main import main
from h2o_flexgen.compiled import threads
from h2o_flexgen.kv_cache import RULES
from h2o_flexgen.planning.budget import BudgetPoint, largest_free
from h2o_flexgen.planning.memory import Resources
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import given_policy

pytest_plugins = ["command_tools"]

KINDS = ["int8", "int4"]
LENGTHS, MAX_TOKENS, SLOTS = [4, 8, 1], 7, (3, 2)
PLACES = {
    "gpu": dict(percent=(100, 0, 100, 0, 100, 0)),
    "cpu": dict(percent=(0, 100, 0, 100, 0, 100)),
    "disk": dict(percent=(0, 0, 0, 0, 0, 0), prefill_tokens=10),
    "mixed": dict(percent=(30, 40, 30, 40, 30, 40)),
    "mixed_in_turn": dict(percent=(100, 0, 40, 30, 100, 0), overlap=False),
    "cpu_attention": dict(percent=(100, 0, 0, 50, 100, 0), cpu_cache_compute=True),
}
#: sizes of the first model of each family, with head sizes divisible by 4
SIZES = dict.fromkeys(zoo.FIRST.values(), {}) | {
    "opt": dict(num_hidden_layers=2, num_attention_heads=2, hidden_size=16, word_embed_proj_dim=16)
}
SIZES |= {"llama": dict(head_dim=8), "qwen2": dict(hidden_size=32)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """model(name) -> the tiny model of that name."""
    made = {}

    def get(name: str = "llama") -> zoo.Tiny:
        if name not in made:
            made[name] = zoo.build(name, tmp_path_factory.mktemp(name), **SIZES[name])
        return made[name]

    return get


def opened(tiny, kind, budget=None, dtype="float32", **policy) -> LLM:
    policy = Policy(**dict(gpu_batch_size=2, num_gpu_batches=2) | policy)
    return LLM(str(tiny.folder), policy, budget, device="cpu", dtype=dtype, compress_cache=kind, progress=False)


def tokens(llm, prompts, max_tokens=MAX_TOKENS) -> list[list[int]]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


@pytest.mark.parametrize("n, name", [*enumerate(SIZES)])
def test_every_family_gives_the_tokens_of_the_oracle(model, n, name):
    """With a full cache in RAM and H2O on disk, one in 8 bits and the other in 4."""
    tiny = model(name)
    for slots, place, kind in zip(((None, None), SLOTS), ("gpu", "disk"), KINDS[:: (-1) ** n]):
        budget = (*slots, "h2o", kind)
        prompts = tiny.clear_cut_prompts(LENGTHS, MAX_TOKENS, [budget])
        expected = [t.tokens for t in tiny.references(prompts, MAX_TOKENS, *budget)]
        with opened(tiny, kind, slots[0] and zoo.sized(*SLOTS, "h2o"), **PLACES[place]) as llm:
            assert tokens(llm, prompts) == expected


@pytest.mark.parametrize("n, place", [*enumerate(PLACES)], ids=PLACES)
def test_the_tokens_do_not_depend_on_the_placement(model, n, place):
    tiny = model()
    for slots, kind in zip(((None, None), SLOTS), KINDS[:: (-1) ** n]):
        budget = (*slots, "smoothed", kind)
        prompts = tiny.clear_cut_prompts(LENGTHS, MAX_TOKENS, [budget])
        expected = [t.tokens for t in tiny.references(prompts, MAX_TOKENS, *budget)]
        with opened(tiny, kind, slots[0] and zoo.sized(*SLOTS), **PLACES[place]) as llm:
            assert tokens(llm, prompts) == expected


@pytest.mark.parametrize("n, rule", [*enumerate(RULES)])
def test_every_rule_gives_the_tokens_of_the_oracle(model, n, rule):
    kind = KINDS[n % 2]
    tiny, budget = model(), (*SLOTS, rule + IN_SHORT.get(rule, ":first=0"), kind)
    prompts = tiny.clear_cut_prompts(LENGTHS, MAX_TOKENS, [budget])
    expected = [t.tokens for t in tiny.references(prompts, MAX_TOKENS, *budget)]
    with opened(tiny, kind, zoo.sized(*budget[:3]), **PLACES["mixed"]) as llm:
        assert tokens(llm, prompts) == expected


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.growth == "fixed"])
def test_rolling_positions_do_not_depend_on_the_placement(model, rule):
    """The first token is that of an exact cache: a prompt attends to exact K and V."""
    tiny = model()
    prompts = tiny.prompts([20, 7, 13])
    budget = KVBudget(hh_size=6, recent_size=6, rule=f"{rule}:first=0", position_rolling=True)
    found = []
    for kind, place in (("int4", "gpu"), ("int4", "disk"), (None, "gpu")):
        with opened(tiny, kind, budget, **PLACES[place]) as llm:
            found.append(tokens(llm, prompts))
    assert found[0] == found[1]
    assert [row[0] for row in found[0]] == [row[0] for row in found[2]]


@pytest.mark.parametrize("kind, dtype", [("int8", "bfloat16"), ("int4", "float16")])
def test_in_16_bits_the_placement_does_not_matter_either(model, kind, dtype):
    prompts, found = model().prompts(LENGTHS), []
    for place in ("gpu", "disk", "mixed", "cpu_attention"):
        with opened(model(), kind, dtype=dtype, **PLACES[place]) as llm:
            found.append(tokens(llm, prompts))
    assert found == found[:1] * len(found)


def test_without_the_compiled_loops_the_tokens_are_the_same(model, monkeypatch):
    """As on a GPU, a few heads are decoded at a time."""
    budget = (*SLOTS, "h2o", "int4")
    prompts = model().clear_cut_prompts(LENGTHS, MAX_TOKENS, [budget])
    expected = [t.tokens for t in model().references(prompts, MAX_TOKENS, *budget)]
    monkeypatch.setattr(threads, "compiled", lambda: None)
    with opened(model(), "int4", zoo.sized(*SLOTS, "h2o"), **PLACES["mixed"]) as llm:
        assert tokens(llm, prompts) == expected


# bytes


@pytest.mark.parametrize("kind, nbytes", [(None, 2 * 4 * 8), ("int8", 2 * (8 + 2)), ("int4", 8 + 2 + 4 + 4)])
def test_plan_and_report_count_the_bytes_of_the_format(model, kind, nbytes):
    with opened(model(), kind, **PLACES["cpu"]) as llm:
        tokens(llm, model().prompts([9, 5]))
        assert llm.report.get("compress_cache") == kind
        caches = [n for tier, what, n in llm.choice.plan.items if (tier, what) == ("cpu", "KV cache")]
    layers, heads, slots = 2, 2, 9 + MAX_TOKENS - 1
    assert caches == [2 * layers * heads * slots * nbytes]


def test_a_step_moves_the_bytes_of_the_format(model):
    moved = {}
    for kind in (None, *KINDS):
        with opened(model(), kind, KVBudget.from_size(20, 20, "h2o"), percent=(100, 0, 0, 100, 100, 0)) as llm:
            tokens(llm, model().prompts([60, 60]), 9)
            moved[kind] = llm.report["bytes_moved"]["cpu_to_gpu"]
    assert moved["int8"] == moved[None] * 20 // 64 and moved["int4"] == moved[None] * 18 // 64


def test_a_search_finds_room_for_more_sequences():
    limits, job = Resources({"gpu": 4 << 30, "cpu": 0, "disk": 1 << 20, "ram": 4 << 30}), Workload((512,) * 64, 64)
    planner = planner_of(laptop(), "facebook/opt-1.3b", gpu_batch_size=2, resident=False)
    sizes = [planner.choose(job, limits, None, None, kind).policy.block_size for kind in (None, "int8", "int4")]
    assert sizes[0] < sizes[1] < sizes[2]


# sessions, scores, jobs


@pytest.mark.parametrize("kind, rolling", [("int8", False), ("int4", True)])
def test_streams_do_not_depend_on_tiers_or_neighbours(model, kind, rolling):
    """A chunk attends to the quantised cache, and to its own exact keys and values."""
    texts = model().prompts([40, 17])
    budget, found = KVBudget.from_size(6, 6), []
    for place in ("gpu", "mixed"):
        with opened(model(), kind, budget, **PLACES[place]) as llm:
            with llm.session(count=2, chunk=9, position_rolling=rolling) as session:
                outputs = session.generate(texts, SamplingParams(max_tokens=9, ignore_eos=True))
                logprobs = session.feed([[5, 6, 7], None])[0]
                found.append([o.token_ids for o in outputs])
            with llm.session(chunk=9, position_rolling=rolling) as session:
                alone = session.generate(texts[1], SamplingParams(max_tokens=9, ignore_eos=True))
                assert alone.token_ids == found[-1][1]
    assert found[0] == found[1]
    with opened(model(), None, budget) as llm, llm.session(count=2, chunk=9, position_rolling=rolling) as session:
        session.generate(texts, SamplingParams(max_tokens=9, ignore_eos=True))
        assert session.feed([[5, 6, 7], None])[0] != pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_read_in_one_chunk_equals_a_prompt(model, kind):
    (text,) = model().prompts([30])
    budget = KVBudget.from_size(6, 6)
    with opened(model(), kind, budget) as llm:
        expected = tokens(llm, [text])
        with llm.session(chunk=64, position_rolling=False) as session:
            params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
            assert session.generate(text, params).token_ids == expected[0]


@pytest.mark.parametrize("kind", KINDS)
def test_generated_tokens_score_as_when_they_were_generated(model, kind):
    prompts = model().prompts(LENGTHS)
    with opened(model(), kind) as llm:
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        outputs = [o.outputs[0] for o in llm.generate(prompts, params)]
        texts = [prompt + o.token_ids for prompt, o in zip(prompts, outputs)]
        for score, output in zip(llm.score(texts, LENGTHS), outputs):
            assert score.token_logprobs == pytest.approx(output.logprobs, abs=1e-5)


def test_a_job_resumes_only_in_its_own_format(cli, model, tmp_path):
    rows, out = write_prompts(tmp_path / "rows.jsonl"), tmp_path / "out.jsonl"
    job = ("--model", model().folder, *FP32, "--input-file", rows, "--output-file", out, "--gen-len", 4)
    code, _, err = cli(*job, "--compress-cache", "int8")
    assert code == 0, err
    assert json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["compress_cache"] == "int8"
    code, _, err = cli(*job, "--compress-cache", "int4")
    assert code == 2 and "began with other settings: --compress-cache 'int8', now 'int4'" in err
    assert cli(*job, "--compress-cache", "int8")[0] == 0


def test_an_automatically_chosen_format_is_kept_in_the_manifest(cli, model, tmp_path):
    rows, out, hardware = write_prompts(tmp_path / "rows.jsonl"), tmp_path / "out.jsonl", tmp_path / "laptop.json"
    hardware.write_text(laptop(dtype="float32").to_json())
    job = ("--model", model().folder, *FP32, "--output-file", out, "--gen-len", 4, "--hardware", hardware)
    code, _, err = cli(*job, "--input-file", rows, "--compress-cache", "auto")
    assert code == 0 and "floats" in err and "int4" in err, err
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["settings"]["compress_cache"] == "auto" and manifest["compress_cache"] != "auto"


# command lines and errors


def test_a_policy_file_sets_the_format(model, tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"policy": {"gpu_batch_size": 2}, "compress_cache": "int8"}))
    assert given_policy(path)[2] == "int8" and given_policy(path, None, "int4")[2] == "int4"
    with LLM(str(model().folder), path, device="cpu", dtype="float32", progress=False) as llm:
        tokens(llm, model().prompts([5]))
        assert llm.report["compress_cache"] == "int8"


def test_plan_reports_what_the_format_saves(model, tmp_path, capfd):
    hardware, out = tmp_path / "laptop.json", tmp_path / "policy.json"
    hardware.write_text(laptop(dtype="float32").to_json())
    job = (str(model().folder), "--hardware", str(hardware), "--prompt-len", "20", "--gen-len", "8")
    assert main(["plan", *job, "--compress-cache", "int8", "-o", str(out)]) == 0
    said = capfd.readouterr().out
    assert "full, in int8" in said and "with K and V in int8" in said and "--compress-cache int8" in said
    found = json.loads(out.read_text())
    assert found["compress_cache"] == "int8"
    sizes = found["model"]["kv_bytes_per_sequence"]
    assert sizes["job"] / sizes["full"] == (8 + 2) / (4 * 8)


def test_a_format_that_does_not_fit_the_model_is_rejected(tiny, cli, capfd):
    odd = tiny("llama")  # heads of 6
    with pytest.raises(
        UserError, match="`compress_cache` int4 is for head sizes that 4 divides, not 6: .* or take int8"
    ):
        opened(odd, "int4")
    with opened(odd, "int8") as llm:
        tokens(llm, odd.prompts([5]))
    with pytest.raises(UserError, match="`compress_cache` is one of int8, int4, not 'int2'"):
        opened(odd, "int2")
    code, _, err = cli("--model", odd.folder, "--compress-cache", "int4", *FP32)
    assert code == 2 and "--compress-cache int4 is for head sizes" in err
    code, _, err = cli("--model", odd.folder, "--compress-cache", "int2")
    assert code == 2 and "invalid choice: 'int2' (choose from" in err
    assert main(["plan", str(odd.folder), "--compress-cache", "int4", *FP32]) == 2
    assert "--compress-cache int4 is for head sizes" in capfd.readouterr().err


# the choice


def test_among_equally_fast_formats_the_one_with_more_bits_is_chosen():
    points = [BudgetPoint(None, 100, 1, 1, speed, kind) for speed, kind in ((100, "int4"), (99, "int8"), (90, None))]
    assert largest_free(points).compress_cache == "int8"
    few = BudgetPoint(0.1, 20, 1, 1, 101, None)
    assert largest_free([*points, few]).compress_cache == "int8"  # losing slots is worse than losing bits
    weights = [replace(point, compress_weight="int8") for point in points]
    assert largest_free([*points, *weights]).compress_weight is None
    slow = [replace(point, tokens_per_s=50) for point in points]
    assert largest_free([*slow, *weights, replace(weights[0], compress_weight="int4")]).compress_weight == "int8"


def test_measured_losses_choose_the_format(tmp_path):
    half = {"rule": "h2o", "slots": 50, "hh_ratio": 0.25, "recent_ratio": 0.25}
    rows = [
        {"rule": "full", "slots": None, "rise": 0.0, "kv_bytes": 1000, "compress_cache": None},
        {"rule": "full", "slots": None, "hh_ratio": None, "recent_ratio": None, "rise": 0.01, "kv_bytes": 400}
        | {"compress_cache": "int4"},
        half | {"rise": 0.05, "kv_bytes": 500, "compress_cache": None},
        half | {"rise": 0.06, "kv_bytes": 200, "compress_cache": "int4"},
    ]
    path = tmp_path / "quality.json"
    workload = {"model": "a", "prompt_len": 100, "gen_len": 100, "hh_share": 0.5}
    path.write_text(json.dumps({"workload": workload, "rows": rows}))
    losses = Losses.from_file(path, 0.055)
    assert losses.formats == {None, "int4"}
    assert losses.cheapest().kv_bytes == 500
    best = losses.cheapest("auto")
    assert (best.kv_budget, best.compress_cache) == (None, "int4") and "the full cache in int4 (+1.0%" in str(best)
    assert losses.at(None, None) == 0 and losses.at(None, None, "int4") == 0.01
    assert losses.at("h2o", 1.25, "int4") == pytest.approx(0.035) and losses.at(None, None, "int8") is None
    with pytest.raises(UserError, match="no budget of rule h2o in int8"):
        losses.at("h2o", 0.5, "int8")
    with pytest.raises(UserError, match="no setting but the full cache with `compress_cache` int8"):
        losses.cheapest("int8")
