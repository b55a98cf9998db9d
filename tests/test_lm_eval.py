"""Under lm-evaluation-harness a full cache scores as the harness's own `hf` model, a KV budget as the oracle."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from importlib.util import find_spec
from itertools import chain
from types import SimpleNamespace

import pytest
import zoo
from command_tools import CHAT_TEMPLATE, environment
from machines import ROOT

from h2o_flexgen import UserError
from h2o_flexgen.commands.main import main
from h2o_flexgen.engine.outputs import ScoreOutput
from h2o_flexgen.evaluation.harness import KNOWN, HarnessLM

pytest_plugins = ["command_tools"]
needs_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")

QUESTIONS = [
    ("A list holds", ["items in order", "one key for each value", "nothing"], 0),
    ("A tuple", ["can be changed", "cannot be changed"], 1),
    ("", ["An empty context", " begins with a blank"], 0),
    ("Trailing blanks go to the answer  ", ["yes", "no, to the question", "both"], 0),
    ("A file is opened with", [" open", " close"], 0),
    ("To end a loop " * 6, ["break", "go on"], 0),
]
MORE = "for name in sorted(state): assert name in shapes\n"
TEXTS = ["def f(x): return x", MORE * 3, "ends early", MORE * 9]
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: "{{choices}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "write": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{stop}}"
generation_kwargs: {until: ["e", "\\n\\n"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
HEAVY = 4
RECENT = 6


@pytest.fixture(scope="module")
def model(texts, tmp_path_factory):
    """A tiny LLaMA with a tokenizer that puts </s> in front, and a chat template."""
    tiny = zoo.build("llama", tmp_path_factory.mktemp("lm_eval") / "model", vocab_size=300, max_position_embeddings=160)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tiny.folder / name).write_text((texts / name).read_text())
    (tiny.folder / "chat_template.jinja").write_text("{{ bos_token }}" + CHAT_TEMPLATE)
    return tiny


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with the tasks above, and their rows as local JSON."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = {
        "choice": [{"question": q, "choices": choices, "answer": answer} for q, choices, answer in QUESTIONS],
        "rolling": [{"text": text} for text in TEXTS],
        "write": [{"text": text, "stop": ""} for text in TEXTS],
    }
    for name, rest in TASKS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / name}.jsonl}}}}\ntest_split: test"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}\n{rest}")
    return folder


@pytest.fixture
def evaluate(tasks, tmp_path, monkeypatch):
    """evaluate(model, model_args, names, ...) -> the harness's results."""
    pytest.importorskip("lm_eval")
    import datasets
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")

    def run(model: str, model_args: dict, names=tuple(TASKS), **how):
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        args = {"dtype": "float32", **model_args}
        how = dict(device="cpu", bootstrap_iters=0, task_manager=manager) | how
        return simple_evaluate(model=model, model_args=args, tasks=list(names), **how)

    return run


def answers(results: dict) -> dict[str, list]:
    """By task, the model's answers to each request, in the order of the rows."""
    found = {}
    for name, rows in results["samples"].items():
        rows = sorted(rows, key=lambda row: row["doc_id"])
        found[name] = list(chain.from_iterable(row["filtered_resps"] for row in rows))
    return found


def same(ours: dict, theirs: dict) -> None:
    ours = answers(ours)
    theirs = answers(theirs)
    assert ours.keys() == theirs.keys()
    for name in ours:
        for one, other in zip(ours[name], theirs[name], strict=True):
            if isinstance(one, str):
                assert one == other
            elif isinstance(one, float):
                assert one == pytest.approx(other, abs=1e-3)
            else:
                assert one == (pytest.approx(other[0], abs=1e-3), other[1])


@pytest.mark.parametrize(
    "args",
    [{}, {"add_bos_token": False, "max_length": 40}, {"add_bos_token": True, "prefix_token_id": 5}],
    ids=lambda args: "".join(args) or "plain",
)
def test_a_full_cache_scores_as_the_hf_model(evaluate, model, args):
    args = {"pretrained": str(model.folder), **args}
    ours = evaluate("h2o_flexgen", args)
    theirs = evaluate("hf", args)
    same(ours, theirs)
    for name, metrics in theirs["results"].items():
        for metric, value in metrics.items():
            if isinstance(value, float):
                assert ours["results"][name][metric] == pytest.approx(value, rel=1e-4)


def test_a_conversation_scores_as_with_the_hf_model(evaluate, model):
    args = {"pretrained": str(model.folder)}
    how = dict(names=("choice", "write"), apply_chat_template=True, system_instruction="Be short.")
    ours = evaluate("h2o_flexgen", args, **how)
    same(ours, evaluate("hf", args, **how))
    assert ours["samples"]["write"][0]["arguments"][0][0].startswith("</s>system: Be short.\nuser: ")


def test_sampling_is_ours_and_repeats(evaluate, model):
    args = {"pretrained": str(model.folder)}
    how = dict(names=["write"], gen_kwargs={"do_sample": True, "temperature": 5.0, "top_k": 50, "until": []})
    once = evaluate("h2o_flexgen", args, **how)
    again = evaluate("h2o_flexgen", args, **how)
    assert answers(once) == answers(again) != answers(evaluate("h2o_flexgen", args, names=["write"]))


def test_sampling_without_a_temperature_has_1(evaluate, model):
    args = {"pretrained": str(model.folder)}
    drawn = [
        answers(evaluate("h2o_flexgen", args, names=["write"], gen_kwargs={"do_sample": True, "until": []} | more))
        for more in ({}, {"temperature": 1.0}, {"temperature": 0.0})
    ]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.fixture
def make(model):
    """make(...) -> a model for the harness, with more of --model_args."""
    pytest.importorskip("lm_eval")

    def made(**args):
        return HarnessLM(**{"pretrained": str(model.folder), "device": "cpu", "dtype": "float32"} | args)

    return made


@pytest.fixture
def small(make):
    """A model with a KV budget, and windows short enough for the oracle."""
    return make(kv_rule=zoo.RULE, hh_size=HEAVY, recent_size=RECENT, max_length=48)


def requests(*args) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=each) for each in args]


def forced(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The oracle's answer, under the KV budget."""
    trace = model.oracle.generate(context, len(continuation), HEAVY, RECENT, forced=continuation)
    assert trace.slack > zoo.SLACK
    return sum(trace.logprobs), trace.margin > 0


PAIRS = [("A list holds", " items in order, or nothing"), ("", "for name in names: print"), (MORE, MORE), ("a", " b")]


@needs_harness
def test_under_a_kv_budget_continuations_score_as_with_the_oracle(model, make, small):
    answers = small.loglikelihood(requests(*PAIRS))
    for (context, continuation), answer in zip(PAIRS, answers, strict=True):
        pair = small._encode_pair(context, continuation) if context else ([2], small.tok_encode(continuation, False))
        context = (pair[0] + pair[1])[-49:][: -len(pair[1])]
        assert answer == (pytest.approx(forced(model, context, pair[1])[0], abs=1e-3), False)
    full = make(max_length=48).loglikelihood(requests(*PAIRS))
    assert [abs(a - b) > 1e-2 for (a, _), (b, _) in zip(answers, full)] == [True, True, True, False]
    heavy_recent = {"heavy": HEAVY, "recent": RECENT, "rule": "smoothed"}
    assert small.get_model_info()["kv_slots"] == {"loglikelihood": heavy_recent}


@needs_harness
def test_the_most_likely_continuation_is_greedy(model, small):
    """The oracle's own tokens; their text would be tokenized differently."""
    context = small.tok_encode("for name in")
    said = model.oracle.generate(context, 12, HEAVY, RECENT).tokens
    ((_, is_greedy), (_, other)) = small._loglikelihood_tokens(
        [(None, context, said), (None, context, said[:-1] + [7])]
    )
    assert is_greedy and not other


@needs_harness
def test_under_a_kv_budget_windows_score_as_with_the_oracle(model, small):
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    totals = small.loglikelihood_rolling(requests(*((text,) for text in TEXTS)))
    for text, total in zip(TEXTS, totals, strict=True):
        windows = get_rolling_token_windows(small.tok_encode(text), 2, 48, 1)
        expected = sum(forced(model, *make_disjoint_window(window))[0] for window in windows)
        assert total == pytest.approx(expected, abs=1e-3)
    assert len(small.tok_encode(TEXTS[-1])) > 3 * 48


@needs_harness
def test_under_a_kv_budget_texts_are_those_of_the_oracle(model, small):
    how = {"until": [], "max_gen_toks": 20}
    texts = small.generate_until(requests(*((text, how) for text in TEXTS)))
    for text, output in zip(TEXTS, texts, strict=True):
        trace = model.oracle.generate(small.tok_encode(text)[-28:], 20, HEAVY, RECENT)
        assert trace.slack > zoo.SLACK
        tokens = trace.tokens[: trace.tokens.index(2)] if 2 in trace.tokens else trace.tokens
        assert output == small.tokenizer.decode(tokens, skip_special_tokens=True)


@needs_harness
def test_a_ratio_is_of_the_longest_context(make):
    lm = make(hh_ratio=0.25, kv_rule="mean:first=1")
    lm.loglikelihood(requests(*PAIRS))
    longest = max(len(lm.tok_encode(context)) for context, _ in PAIRS)
    slots = {"heavy": longest // 4, "recent": longest // 4, "rule": "mean:first=1"}
    assert lm.kv_slots["loglikelihood"] == slots


@needs_harness
def test_a_ratio_is_refused_where_contexts_say_nothing_of_the_work(evaluate, model, make, tmp_path):
    with pytest.raises(UserError, match="decodes whole texts: a ratio .* give `hh_size`"):
        make(hh_ratio=0.25).loglikelihood_rolling(requests(("a",)))
    with pytest.raises(UserError, match="requests that are left: a ratio"):
        args = {"pretrained": str(model.folder), "hh_ratio": 0.25}
        evaluate("h2o_flexgen", args, ["choice"], use_cache=str(tmp_path / "cache"))


def test_answers_in_the_cache_are_not_asked_for_again(evaluate, model, tmp_path, monkeypatch):
    args = {"pretrained": str(model.folder), "hh_size": HEAVY}
    first = evaluate("h2o_flexgen", args, use_cache=str(tmp_path / "cache"))
    again = evaluate("h2o_flexgen", args, use_cache=str(tmp_path / "cache"))
    for name in ("score", "generate"):
        monkeypatch.setattr(f"h2o_flexgen.llm.LLM.{name}", None)
    evaluate("h2o_flexgen", args, use_cache=str(tmp_path / "cache"))
    assert answers(first) == answers(again)


@needs_harness
def test_answers_are_in_the_cache_as_soon_as_their_batch_is_done(make, monkeypatch):
    """So that an interrupt loses only the running block."""
    seen = []
    lm = make()
    lm.cache_hook = SimpleNamespace(add_partial=lambda *what: seen.append(what))
    pairs = requests(("a", " b"), ("a", " c"))

    def score(rows, prompt_len, *, first_scored, on_output):
        on_output(ScoreOutput(1, rows[1], [-1.0], rows[1][-1:]))
        raise KeyboardInterrupt

    monkeypatch.setattr(lm.llm, "score", score)
    with pytest.raises(KeyboardInterrupt):
        lm.loglikelihood(pairs)
    assert seen == [("loglikelihood", ("a", " c"), (-1.0, True))]


@needs_harness
def test_a_model_is_made_of_a_line_of_arguments(model):
    """The harness names cuda:0 if its user names no device."""
    line = f"pretrained={model.folder},dtype=float32,hh_size=4,max_length=100,mem=2,gpu_mem=0.5"
    lm = HarnessLM.create_from_arg_string(line, {"device": "cuda:0", "batch_size": "auto"})
    assert lm.max_length == 100 and lm.llm.kv_budget.hh_size == 4
    assert lm.llm.caps["gpu"] == 1 << 29 and lm.llm.caps["ram"] == 2 << 30
    assert not lm.llm.device.is_cuda
    with pytest.raises(UserError, match="cuda"):
        HarnessLM.create_from_arg_string(f"{line},device=cuda", {"device": "cuda:0"})


BAD = [
    (
        dict(hh_ration=0.2),
        "unknown in --model_args: hh_ration; known: pretrained, path, .*, prefix_token_id$",
    ),
    (dict(hh_ratio="lots"), "`hh_ratio` must be a number, not 'lots'"),
    (dict(hh_ratio=20), "for 20 % give 0.2"),
    (dict(hh_size=True), "`hh_size` must be a number"),
    (dict(kv_rule="mean"), "`kv_rule` says which tokens a KV budget keeps"),
    (dict(kv_rule="meen", hh_size=4), "unknown `kv_rule` 'meen'; known: h2o, smoothed"),
    (dict(gpu_mem=0), "`gpu_mem` must be more than 0 GiB, not 0"),
    (dict(max_length=161), "`max_length` must be a whole number up to 160, the most"),
    (dict(max_length=0), "`max_length` must be a whole number"),
    (dict(pretrained="./nowhere"), "nowhere: no such folder"),
    (dict(revision=1234567), "`revision` must be a branch, a tag or a commit, not 1234567"),
    (dict(revision="main"), "is on this machine, and only a repository on the hub has revisions"),
]


@pytest.mark.parametrize("trusted", [True, False])
def test_trust_remote_code_is_ignored_with_a_warning(tiny, caplog, trusted):
    with pytest.raises(UserError, match="has no tokenizer"):
        HarnessLM(str(tiny("llama").folder), device="cpu", trust_remote_code=trusted)
    assert caplog.text.count("trust_remote_code is ignored") == trusted


@needs_harness
@pytest.mark.parametrize("args, says", BAD, ids=[next(iter(args)) for args, _ in BAD])
def test_an_argument_that_cannot_be_used_is_refused(make, args, says):
    with pytest.raises(UserError, match=says):
        make(**args)


@needs_harness
def test_requests_that_cannot_be_run_are_refused(make, tiny):
    lm = make(max_length=20)
    with pytest.raises(UserError, match="a continuation has [0-9]+ tokens; `max_length` is 20"):
        lm.loglikelihood(requests(("a", MORE)))
    for refuses in (lm, make(hh_size=HEAVY)):
        with pytest.raises(UserError, match="loglikelihood, request 1: the continuation adds no token"):
            refuses.loglikelihood(requests(("a", " b"), ("a", "")))
    with pytest.raises(UserError, match="20 tokens are to be generated; `max_length` is 20"):
        lm.generate_until(requests(("a", {"max_gen_toks": 20})))
    with pytest.raises(UserError, match="unknown in --gen_kwargs: num_beams; known: until, "):
        lm.generate_until(requests(("a", {"max_gen_toks": 2, "num_beams": 4})))
    with pytest.raises(UserError, match="no tokenizer"):
        make(pretrained=str(tiny("opt").folder))


@needs_harness
def test_the_command_is_the_harness_with_an_additional_model(model, tasks, tmp_path):
    args = f"pretrained={model.folder},hh_size=8,kv_rule=mean:first=2,dtype=float32,device=cpu"
    job = ["--model", "h2o_flexgen", "--tasks", "choice", "--include_path", tasks, "--output_path", tmp_path / "out"]
    words = [sys.executable, "-m", "h2o_flexgen.lm_eval", *job, "--model_args", args]
    env = environment(HF_HOME=str(tmp_path / "hf"))
    done = subprocess.run(words, env=env, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "|choice|" in done.stdout
    (file,) = (tmp_path / "out").rglob("results_*.json")
    slots = {"heavy": 8, "recent": 8, "rule": "mean:first=2"}
    assert json.loads(file.read_text())["config"]["kv_slots"] == {"loglikelihood": slots}


@needs_harness
def test_the_models_of_the_harness_are_still_there():
    code = "import h2o_flexgen.lm_eval; from lm_eval.api.registry import get_model as m; m('h2o_flexgen'), m('dummy')"
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)


@needs_harness
def test_a_user_error_is_one_line(make, monkeypatch, capsys):
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: make(hh_ration=0.2))
    assert main(["lm_eval", "--model", "h2o_flexgen"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: unknown in --model_args: hh_ration; known: pretrained, ") and err.count("\n") == 1


def test_without_the_harness_the_error_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["lm_eval", "--help"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: lm-evaluation-harness cannot be loaded (") and "pip install lm-eval" in err
    assert err.count("\n") == 1


@needs_harness
def test_commands_of_the_document_name_options_of_the_harness():
    from lm_eval._cli import HarnessCLI

    text = (ROOT / "docs" / "lm-eval.md").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("h2o-flexgen lm_eval ")]
    assert len(lines) >= 6
    for line in lines:
        args = HarnessCLI()._parser.parse_args(["run", *shlex.split(line, comments=True)[2:]])
        assert args.model == "h2o_flexgen"
        assert args.model_args.keys() <= set(KNOWN)
