"""All results for a model and some texts, as plain data."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch
from torch import Tensor

from h2o_flexgen.analysis import future, neurons, ranks, sparsity
from h2o_flexgen.analysis.attention import mix, probabilities
from h2o_flexgen.analysis.simulation import masked_logprobs, simulate
from h2o_flexgen.analysis.words import REACH, Words
from h2o_flexgen.errors import UserError
from h2o_flexgen.kv_cache.fixed_rule import FixedRule
from h2o_flexgen.profiling.layer_model import LayerModel
from h2o_flexgen.utils.progress import bar

#: points of a curve that are kept
POINTS = 25
#: fractions of the neurons whose share of all activations is reported
PARTS = (0.1, 0.2)


@dataclass
class Observation:
    """The results of one pass over a text with full attention. L layers, KV heads, N tokens.

    Attributes:
        negligible: (L,) share of attention that is negligible.
        received: (L, KV, N) attention that each token receives from all queries; prompt_received: from the prompt's.
        active: (L, inner) number of tokens for which each neuron is active.
        logprobs: (M,) for the tokens behind the prompt.
    """

    negligible: Tensor
    received: Tensor
    prompt_received: Tensor
    active: Tensor
    logprobs: Tensor


@torch.inference_mode()
def observe(model: LayerModel, ids: Tensor, prompt_len: int) -> Observation:
    """One pass over a text ids (N,)."""
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    negligible = []
    received = []
    prompt_received = []
    active = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = probabilities(q, k, causal)
        negligible.append(sparsity.negligible(p))
        received.append(p.sum((2, 3))[0])
        prompt_received.append(p[:, :, :, :prompt_len].sum((2, 3))[0])
        return mix(p, v)

    is_relu = model.spec.activation == "relu"
    with neurons.watched(lambda x: active.append(neurons.active(x, is_relu))):
        hidden = model.run(ids[None], 0, attend)
    logprobs = model.logprobs(hidden[:, prompt_len - 1 : -1], ids[None, prompt_len:])[0]
    each = (torch.stack(found) for found in (received, prompt_received, active))
    return Observation(torch.tensor(negligible), *each, logprobs)


def check_rule(rule: FixedRule, prompt_len: int) -> None:
    """Raises UserError if the prompt is too short for the rule's heavy hitters and as many other tokens."""
    if not 0 < rule.heavy <= prompt_len // 2:
        raise UserError(
            f"the analysis masks the heavy hitters of a prompt, and as many other tokens: {rule.heavy} slots for heavy "
            f"hitters are not between 1 and half of the prompt's {prompt_len} tokens"
        )


def study(model: LayerModel, windows: Tensor, prompt_len: int, rule: FixedRule, progress: bool = True) -> dict:
    """All results for texts `windows` (B, N), each a prompt of `prompt_len` tokens and its continuation."""
    B, N = windows.shape
    shown = bar(list(windows), "passes with full attention", unit="windows", show=progress)
    seen = [observe(model, ids, prompt_len) for ids in shown]
    received = torch.stack([each.received for each in seen], 1)  # (L, B, KV, N)
    run = simulate(model, windows, prompt_len, rule, progress)
    rules = [rule.in_layer(layer) for layer in range(model.spec.layers)]
    split = [(each.slots - each.recent_window, each.recent_window) for each in rules]
    layers = [future.kept_with_future(layer, prompt_len, *slots) for layer, slots in zip(received, split)]
    foreseen = torch.stack(layers)
    active = sum(each.active for each in seen)
    losses = {"full cache": torch.stack([each.logprobs for each in seen]), rule.label: run.logprobs}
    losses |= _masked(model, windows, prompt_len, rule.heavy, seen, foreseen, progress)
    return {
        "sparsity": _sparsity(torch.stack([each.negligible for each in seen])),
        "ranks": _ranks(received),
        "words": _words(windows, received),
        "overlap": _overlap(run.kept, foreseen, [recent for _, recent in split]),
        "loss": _loss(losses),
        "neurons": _neurons(active.double() / (B * N), model.spec.activation),
    }


def _masked(model, windows, prompt_len, heavy, seen, foreseen, progress) -> dict[str, Tensor]:
    """Log-probabilities (B, M) where the tokens behind the prompt see what a mask of each kind lets them see."""
    rng = torch.Generator().manual_seed(0)
    found = defaultdict(list)
    for n, ids in enumerate(bar(list(windows), "passes with masks", unit="windows", show=progress)):
        received = seen[n].prompt_received
        first = torch.arange(len(ids)) == 0
        hitters = future.heaviest(received, heavy)
        without = {
            "without heavy hitters": hitters,
            "without the first token": first.expand_as(hitters),
            "without heavy hitters but the first token": future.heaviest(received.masked_fill(first, 0), heavy),
            "without as many random others": future.random_others(hitters, prompt_len, rng),
        }
        masks = {"heavy hitters, future known": foreseen[:, n]}
        masks |= {name: ~gone[:, :, None] for name, gone in without.items()}
        for name, mask in masks.items():
            found[name].append(masked_logprobs(model, ids, prompt_len, mask))
    return {name: torch.stack(rows) for name, rows in found.items()}


def _sparsity(negligible: Tensor) -> dict:
    """negligible (B, L)."""
    by_layer = negligible.mean(0).tolist()
    return {"threshold": sparsity.THRESHOLD, "mean": fmean(by_layer), "by_layer": by_layer}


def _ranks(received: Tensor) -> dict:
    curves = [ranks.curve(layer) for layer in received]
    mean = torch.stack(curves).mean(0)
    N = len(mean)
    at = ranks.log_spaced(POINTS, N)
    picked = torch.tensor(at) - 1
    return {
        "rank": at,
        "share": mean[picked].tolist(),
        "share_by_layer": [curve[picked].tolist() for curve in curves],
        "top_tenth": float(mean[: max(1, N // 10)].sum()),
        "fit": {
            "ranks": [ranks.FIRST_RANK, int(ranks.LAST_PART * N)],
            **ranks.fit_power_law(mean)._asdict(),
            "exponent_by_layer": [ranks.fit_power_law(curve).exponent for curve in curves],
        },
    }


def _words(windows: Tensor, received: Tensor) -> dict:
    words = Words.of(windows, received.sum((0, 2)))
    points = {"co_occurrences": words.co_occurrences.long().tolist(), "score": words.score.tolist()}
    return {"reach": REACH, "correlation": words.correlations(), **points}


def _overlap(kept: Tensor, foreseen: Tensor, recent: list[int]) -> dict:
    slots, heavy, chance = future.overlaps(kept, foreseen, recent)
    return {
        "mean": float(slots.mean()),
        "heavy_mean": float(heavy.mean()),
        "heavy_by_chance": chance,
        "by_layer": slots.tolist(),
        "heavy_by_layer": heavy.tolist(),
    }


def _loss(logprobs: dict[str, Tensor]) -> list[dict]:
    perplexity = {name: float((-values.double().mean()).exp()) for name, values in logprobs.items()}
    full = perplexity["full cache"]
    return [{"cache": name, "perplexity": p, "rise": p / full - 1} for name, p in perplexity.items()]


def _neurons(frequency: Tensor, activation: str) -> dict:
    """frequency (L, inner)."""
    ranked = frequency.sort(-1, descending=True).values
    picked = torch.linspace(0, ranked.shape[1] - 1, POINTS).round().long()
    is_active = (
        "relu > 0" if activation == "relu" else f"|{activation}| > {neurons.THRESHOLD:.0%} of the token's largest"
    )
    return {
        "is_active": is_active,
        "mean": float(frequency.mean()),
        "mean_by_layer": frequency.mean(1).tolist(),
        "rank": (picked + 1).tolist(),
        "frequency": ranked[:, picked].mean(0).tolist(),
        "frequency_by_layer": ranked[:, picked].tolist(),
        "carried": {f"{part:g}": fmean(map(partial(neurons.carried, part=part), frequency)) for part in PARTS},
    }
