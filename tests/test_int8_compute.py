"""`compute` int8: the engine gives the scores of transformers with the same matmuls, wherever the weights are."""

from __future__ import annotations

import copy
from itertools import cycle
from math import prod

import pytest
import torch
import zoo
from int8_oracle import multiplying, patch
from machines import kernels
from oracle import IN_SHORT
from test_compressed_weights import PLACES, models  # noqa: F401  a fixture

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams
from h2o_flexgen.errors import UserError
from h2o_flexgen.kernels import int8, linear, operands
from h2o_flexgen.kv_cache import RULES
from h2o_flexgen.models.registry import family, read_spec
from h2o_flexgen.models.spec import shapes_of
from h2o_flexgen.storage import weights

#: tolerance of log-probabilities: elements that differ in their last bit may round to different codes
BOUND = 0.01
#: the same where later tokens see such a difference through a cache in 4 bits
BOUND_CACHED = 0.05
#: the outlier ratio of these tests, whose rows are too short for real outliers
LIMIT = 3.0


@pytest.fixture(autouse=True)
def many_outliers(monkeypatch):
    monkeypatch.setattr(operands, "OUTLIER_RATIO", LIMIT)


def score(
    folder, texts, kind="int8", compute="int8", budget=None, prompt_len=4, cache=None, **policy
) -> list[list[float]]:
    formats = dict(compress_weight=kind, compress_cache=cache, compute=compute)
    with LLM(str(folder), Policy(**policy), budget, "cpu", "float32", **formats, progress=False) as llm:
        return [s.token_logprobs for s in llm.score(texts, prompt_len)]


def logprobs(model, text: list[int], prompt_len: int = 4) -> list[float]:
    with torch.inference_mode():
        found = model(torch.tensor([text])).logits[0].float().log_softmax(dim=-1)
    return [float(found[n - 1, text[n]]) for n in range(prompt_len, len(text))]


KINDS = ["int8", "int4", "blocks"]


@pytest.fixture(params=KINDS)
def kind(request):
    """How weights are compressed: "blocks" is int4 on a CPU that multiplies blocks directly."""
    if request.param == "blocks":
        request.getfixturevalue("fast_blocks")
    return request.param


def compressed(kind: str) -> str:
    return "int4" if kind == "blocks" else kind


#: of families without experts, whose matmuls `close_call_free` cannot watch
NAMES = [name for name in zoo.FIRST.values() if "num_experts_per_tok" not in zoo.CONFIGS[name] and name != "mixtral"]


@pytest.mark.parametrize("name, kind", [*zip(NAMES, cycle(KINDS))], indirect=["kind"])
def test_every_family_gives_the_scores_of_the_oracle(models, name, kind):  # noqa: F811
    tiny, rounded = models(name, kind)
    texts, expected = close_call_free(tiny, rounded.hf, kind)
    exact = [logprobs(rounded.hf, text) for text in texts]
    found = score(tiny.folder, texts, compressed(kind), gpu_batch_size=2, percent=PLACES["mixed"])
    assert difference(found, expected) < BOUND
    assert difference(exact, expected) > 0


def close_call_free(tiny, model, kind: str) -> tuple[list, list]:
    """Two texts, and their scores by a model whose matmuls are in int8. No element is so close to another code or to
    the outlier limit that a change in its last bit matters, as sums in another order would make."""

    def scores(texts: list, noise: int | None) -> list[list[float]]:
        oracle = copy.deepcopy(model)
        patch(oracle, LIMIT, operands.MAX_OUTLIERS, rounds=kind != "blocks", noise=noise)
        return [logprobs(oracle, text) for text in texts]

    for seed in range(100):
        texts = tiny.prompts([12, 9], seed)
        expected = scores(texts, None)
        if all(difference(scores(texts, noise), expected) < BOUND / 10 for noise in range(3)):
            return texts, expected
    raise AssertionError("every text is a close call")


def difference(some: list[list[float]], others: list[list[float]]) -> float:
    """The largest difference between two lists of scores."""
    return max(abs(a - b) for x, y in zip(some, others) for a, b in zip(x, y))


@pytest.mark.parametrize("n, rule, kind", [(n, rule, KINDS[n % 3]) for n, rule in enumerate(RULES)], indirect=["kind"])
def test_with_a_cache_in_fewer_bits_every_rule_gives_the_scores_of_the_oracle(models, n, rule, kind):  # noqa: F811
    tiny, rounded = models("llama", kind)
    oracle = multiplying(rounded.oracle, LIMIT, operands.MAX_OUTLIERS, rounds=kind != "blocks")
    cache, place = ("int8", "int4")[n % 2], [*PLACES.values()][n % len(PLACES)]
    budget = (3, 2, rule + IN_SHORT.get(rule, ":first=0"))
    # no eviction and no code of the cache is so close a call that one element of a matmul could decide it
    texts = (tiny.prompts([9], seed)[0] for seed in range(100))
    traces = ((text, oracle.generate(text, 6, *budget, cache)) for text in texts)
    text, trace = next((text, trace) for text, trace in traces if trace.slack > 1e-3 and trace.rounding > 1)
    options = dict(budget=zoo.sized(*budget), prompt_len=len(text), cache=cache, percent=place)
    (found,) = score(tiny.folder, [text + trace.tokens], compressed(kind), **options)
    assert found == pytest.approx(trace.logprobs, abs=BOUND_CACHED)


def test_scores_do_not_depend_on_the_placement(models, kind, monkeypatch):  # noqa: F811
    tiny, _ = models("llama_no_groups_tied", compressed(kind))
    texts = tiny.prompts([12, 9, 15])
    budget = None if kind == "int8" else KVBudget.from_size(3, 3)
    sizes = dict(gpu_batch_size=2, num_gpu_batches=2)
    found = []
    for place, packs in ((PLACES["gpu"], True), (PLACES["gpu"], False), (PLACES["cpu"], True), (PLACES["disk"], True)):
        monkeypatch.setattr(weights, "packs_int8", lambda packs=packs: packs and int8.can_pack())
        found.append(score(tiny.folder, texts, compressed(kind), budget=budget, percent=place, **sizes))
    assert found == found[:1] * len(found)


def test_floats_in_the_checkpoint_must_be_compressed_first(models):  # noqa: F811
    tiny, _ = models("llama", "int8")
    with pytest.raises(UserError, match="add `compress_weight` int8 or int4"):
        score(tiny.folder, [], None)
    with pytest.raises(UserError, match="`compute` is one of exact, int8, not 'int4'"):
        score(tiny.folder, [], "int8", "int4")


def test_random_weights_are_multiplied_in_int8_too(models, kind):  # noqa: F811
    tiny, _ = models("llama", compressed(kind))
    found = []
    for percent in (PLACES["gpu"], PLACES["disk"]):
        options = dict(path="_DUMMY_", compress_weight=compressed(kind), compute="int8", device="cpu", dtype="float32")
        with LLM(str(tiny.folder), Policy(percent=percent), **options, progress=False) as llm:
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            found.append(llm.generate([[5, 6, 7, 8]], params)[0].outputs[0].token_ids)
        assert llm.report["compute"] == "int8" and llm.report.get("in_blocks", False) == (kind == "blocks")
        assert llm.report["weights"] == sorted({"int8", compressed(kind)})
    assert found[0] == found[1]


@pytest.mark.usefixtures("fast_blocks")
def test_codes_that_memory_has_no_room_for_are_not_made(models):  # noqa: F811
    """Blocks are then multiplied as stored even where codes of 8 bits are faster."""
    linear.use(kernels(blocks=False))
    tiny, _ = models("llama", "int4")
    layers = family("llama").tensors(read_spec(tiny.folder))
    matrices = sum(prod(shape) for shape in shapes_of(layers).values() if len(shape) > 1)
    options = dict(compress_weight="int4", compute="int8", device="cpu", dtype="float32", progress=False)
    found = {}
    for room in (matrices, 2 * matrices):
        with LLM(str(tiny.folder), Policy(1), mem=room, **options) as llm:
            found[room] = llm.model.operands["int4"]
    assert list(found.values()) == ["int4", "int8"]
