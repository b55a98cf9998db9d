"""Each measure against a slow and obvious computation."""

from __future__ import annotations

from math import log
from statistics import correlation, fmean

import pytest
import torch
from analysis_tools import resident

from h2o_flexgen.analysis import future, neurons, ranks, sparsity
from h2o_flexgen.analysis.study import observe, study
from h2o_flexgen.analysis.words import REACH, Words, pearson
from h2o_flexgen.analysis.words import ranks as places
from h2o_flexgen.kv_cache import make_rule

N = 40
PROMPT = 24


def random(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def attentions(tiny):
    """attentions(name, ids) -> transformers' attention probabilities (L, H, N, N) of one text."""

    def run(name: str, ids: torch.Tensor) -> torch.Tensor:
        hf = tiny(name).hf
        hf.set_attn_implementation("eager")
        with torch.inference_mode():
            return torch.cat(hf(ids[None], output_attentions=True).attentions)

    return run


@pytest.mark.parametrize("name", ["opt", "llama", "gpt_neox"])
def test_an_observation_is_of_the_attention_of_transformers(tiny, attentions, name):
    (ids,) = torch.tensor(tiny(name).prompts([N]))
    model = resident(tiny(name))
    p = attentions(name, ids)
    seen = observe(model, ids, PROMPT)
    for layer in range(model.spec.layers):
        small = pairs = 0
        received = torch.zeros(2, model.spec.kv_heads, N)
        for head in range(model.spec.heads):
            for i in range(N):
                row = p[layer, head, i, : i + 1]
                small += sum(x < 0.01 * max(row) for x in row)
                pairs += i + 1
                received[0, head // model.spec.groups, : i + 1] += row
                received[1, head // model.spec.groups, : i + 1] += row * (i < PROMPT)
        assert seen.negligible[layer] == pytest.approx(float(small) / pairs, abs=1e-3)
        assert seen.received[layer] == pytest.approx(received[0], abs=1e-4)
        assert seen.prompt_received[layer] == pytest.approx(received[1], abs=1e-4)


def test_masked_pairs_are_not_sparsity():
    p = torch.full((1, 4, 4), 0.25).tril()
    assert sparsity.negligible(p / p.sum(-1, keepdim=True)) == 0
    p[0, 3] = torch.tensor([0.99, 0.0099, 0.0001, 0.0])
    assert sparsity.negligible(p) == pytest.approx(2 / 10)


def test_the_exponent_of_a_power_law_is_found():
    rank = torch.arange(1, 301).double()
    assert ranks.fit_power_law(3 * rank**-0.7) == pytest.approx((0.7, 3.0, 1.0))
    bent = rank**-0.7
    bent[0] = 50.0  # neither this nor the last half count
    bent[150:] = 1e-9
    assert ranks.fit_power_law(bent).exponent == pytest.approx(0.7)
    assert ranks.fit_power_law(bent * random(300).double().add(0.5)).r2 < 0.99


def test_the_curve_is_the_mean_of_what_each_head_ranks():
    received = random(2, 3, 7)
    ranked = [sorted((row / row.sum()).tolist(), reverse=True) for row in received.flatten(0, 1)]
    expected = [fmean(shares) for shares in zip(*ranked)]
    assert ranks.curve(received).tolist() == pytest.approx(expected)


def test_words_are_counted_pair_by_pair():
    ids = torch.randint(0, 9, (3, N), generator=torch.Generator().manual_seed(1))
    received = random(3, N)
    words = Words.of(ids, received)
    co_occurrences = dict.fromkeys(range(9), 0.0)
    score = dict.fromkeys(range(9), 0.0)
    occurrences = dict.fromkeys(range(9), 0.0)
    for text, attention in zip(ids.tolist(), received.tolist()):
        for j in range(1, N):
            occurrences[text[j]] += 1
            score[text[j]] += attention[j]
            co_occurrences[text[j]] += sum(1 for i in range(N) if 0 < abs(i - j) <= REACH)
    assert words.co_occurrences.tolist() == list(co_occurrences.values())
    assert words.occurrences.tolist() == list(occurrences.values())
    assert words.score.tolist() == pytest.approx(list(score.values()))


def test_correlations():
    assert places(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1, 3.5, 2]
    a = [1.0, 2.0, 4.0, 9.0]
    b = [2.0, 1.0, 5.0, 6.0]
    assert pearson(torch.tensor(a), torch.tensor(b)) == pytest.approx(correlation(a, b))
    ones = torch.ones(3)
    found = Words(torch.tensor([1.0, 10.0, 100.0]), ones, torch.tensor([1.0, 2.0, 4.0])).correlations()
    assert found["summed"] == pytest.approx({"spearman": 1.0, "pearson_of_logs": 1.0})


@pytest.mark.parametrize("heavy, recent", [(3, 4), (5, 0), (0, 6), (30, 20)])
def test_with_the_future_known_the_heaviest_of_the_whole_text_are_kept(heavy, recent):
    received = random(2, N)
    kept = future.kept_with_future(received, PROMPT, heavy, recent)
    assert kept.shape == (2, N - PROMPT, N)
    for h in range(2):
        for step in range(N - PROMPT):
            held = range(PROMPT + step)
            window = set(held[len(held) - recent :]) if recent else set()
            old = sorted(set(held) - window, key=lambda j: -received[h, j])
            assert set(kept[h, step].nonzero()[:, 0].tolist()) == window | set(old[:heavy])


def test_overlaps_are_shares_of_sets():
    kept = future.kept_with_future(random(2, 3, N), PROMPT, 4, 5)
    foreseen = future.kept_with_future(random(3, 2, N).view(2, 3, N), PROMPT, 4, 5)
    slots, heavy, chance = future.overlaps(kept, foreseen, 5)
    for layer in range(2):
        shares = []
        heavy_shares = []
        by_chance = []
        for h in range(3):
            for step in range(N - PROMPT):
                ours, theirs = (set(x[layer, h, step].nonzero()[:, 0].tolist()) for x in (kept, foreseen))
                old = set(range(PROMPT + step - 5))
                shares.append(len(ours & theirs) / len(theirs))
                heavy_shares.append(len(ours & theirs & old) / len(theirs & old))
                by_chance.append(4 / len(old))
        assert slots[layer] == pytest.approx(sum(shares) / len(shares))
        assert heavy[layer] == pytest.approx(sum(heavy_shares) / len(heavy_shares))
    assert chance == pytest.approx(sum(by_chance) / len(by_chance))


def test_others_are_as_many_and_none_of_the_chosen():
    received = random(2, 3, N)
    received[..., PROMPT:] = 0
    chosen = future.heaviest(received, 5)
    others = future.random_others(chosen, PROMPT, torch.Generator().manual_seed(0))
    assert (others.sum(-1) == 5).all() and not (others & chosen).any() and not others[..., PROMPT:].any()
    for row, best in zip(received.view(-1, N), chosen.view(-1, N)):
        assert set(best.nonzero()[:, 0].tolist()) == set(sorted(range(N), key=lambda j: -row[j])[:5])


def activations(hf, name: str, ids: torch.Tensor) -> list[torch.Tensor]:
    """The outputs of transformers' activation functions, layer by layer (N, inner)."""
    layers = hf.model.decoder.layers if name == "opt" else hf.base_model.layers
    of = {"opt": lambda layer: layer.activation_fn, "llama": lambda layer: layer.mlp.act_fn}
    found = []
    hooks = []
    for function in {of.get(name, lambda layer: layer.mlp.act)(layer) for layer in layers}:
        hooks.append(function.register_forward_hook(lambda m, i, out: found.append(out.reshape(len(ids), -1).clone())))
    with torch.inference_mode():
        hf(ids[None])
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", ["opt", "llama", "gpt_neox"])
def test_a_neuron_is_active_by_what_its_activation_function_returns(tiny, name):
    (ids,) = torch.tensor(tiny(name).prompts([N]))
    model = resident(tiny(name))
    seen = observe(model, ids, PROMPT)
    found = activations(tiny(name).hf, name, ids)
    assert len(found) == model.spec.layers
    for layer, x in enumerate(found):
        for neuron in range(model.spec.inner):
            each = [row[neuron] > 0 if name == "opt" else abs(row[neuron]) > 0.01 * max(abs(row)) for row in x]
            assert abs(int(seen.active[layer, neuron]) - sum(each)) <= 1  # a close call


def test_the_most_active_neurons_carry_their_share():
    frequency = torch.tensor([0.1, 0.5, 0.0, 0.2, 0.0, 0.0, 0.1, 0.0, 0.1, 0.0])
    assert neurons.carried(frequency, 0.1) == pytest.approx(0.5)
    assert neurons.carried(frequency, 0.2) == pytest.approx(0.7)


def test_a_study_holds_all_results(tiny):
    model = resident(tiny("llama"))
    windows = torch.tensor(tiny("llama").prompts([N] * 2))
    found = study(model, windows, PROMPT, make_rule("h2o", 4, 5), progress=False)
    seen = [observe(model, ids, PROMPT) for ids in windows]
    by_layer = (seen[0].negligible + seen[1].negligible) / 2
    assert found["sparsity"]["by_layer"] == pytest.approx(by_layer.tolist())
    active = (seen[0].active + seen[1].active).double() / (2 * N)
    assert found["neurons"]["mean"] == pytest.approx(float(active.mean()))
    full = torch.stack([each.logprobs for each in seen]).mean()
    loss = {row["cache"]: row for row in found["loss"]}
    assert log(loss["full cache"]["perplexity"]) == pytest.approx(-float(full), abs=1e-5)
    assert list(loss) == ["full cache", "h2o", *list(loss)[2:]] and len(loss) == 7
    for row in loss.values():
        assert row["rise"] == pytest.approx(row["perplexity"] / loss["full cache"]["perplexity"] - 1)
    assert len({round(row["perplexity"], 4) for row in loss.values()}) == 7
    assert 0 < found["overlap"]["heavy_mean"] < found["overlap"]["mean"] < 1
    assert len(found["words"]["score"]) == len(set(windows[:, 1:].flatten().tolist()))
