"""Measure what ideas around a KV budget cost in perplexity, alone and together, all with the same number of slots.

    python -m bench.budget_ideas TEXT TEXT --windows 2 --output docs/benchmarks/budget_ideas.json

Each layer reads a whole text at once, and only its attention goes token by token, under the rule `voted` with the slots
of each KV head as the engine shares them out. So a setting takes a quarter of the time that the engine takes for it,
and an idea is a line of the loop below. The engine's own loss is noted beside that of the plain rule.

Shapes: B texts of N tokens, P of them the prompt; KV heads, G query heads in each, D elements of a head, S slots.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen import LLM, KVBudget
from h2o_flexgen.commands.main import execute
from h2o_flexgen.commands.options import Parser
from h2o_flexgen.evaluation.origin import origin
from h2o_flexgen.evaluation.passages import passages_of, read_source
from h2o_flexgen.evaluation.perplexity import logprob
from h2o_flexgen.evaluation.trials import standard_error
from h2o_flexgen.formats import dtype_name
from h2o_flexgen.kv_cache.voted import VotedCache
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.profiling.layer_model import LayerModel
from h2o_flexgen.utils.files import rounded, to_json, write_text
from h2o_flexgen.utils.progress import bar

RULE = "voted"
PROMPT = GENERATED = 512
#: texts that go through a layer together
TEXTS = 8


@dataclass(frozen=True)
class Idea:
    """How a head uses its slots.

    Attributes:
        first, last: shares of the slots that keep the ends of the prompt, whatever their scores (arXiv 2605.18053).
        prompt: the share of the slots that the prompt may take.
        apart: later tokens do not compete with those that the prompt has kept by rank (SCOPE, arXiv 2412.13649).
        every: steps between two evictions. Before one a head holds its slots, after it so many fewer.
        is_random: among tokens that are not recent, chance decides which goes (arXiv 2609.03430).
        by_head: slots as measured for each head; else all heads have the same.
    """

    first: float = 0.0
    last: float = 0.0
    prompt: float = 1.0
    apart: bool = False
    every: int = 1
    is_random: bool = False
    by_head: bool = True


IDEAS = {
    "`voted`": Idea(),
    "the same slots in all heads": Idea(by_head=False),
    "random tokens": Idea(is_random=True),
    "a tenth of the slots for either end of the prompt": Idea(first=0.1, last=0.1),
    "the prompt gets three quarters": Idea(prompt=0.75),
    "the prompt gets three quarters, apart from the output": Idea(prompt=0.75, apart=True),
    "evicting every 8 steps": Idea(every=8),
    "ends and three quarters": Idea(first=0.1, last=0.1, prompt=0.75),
    "ends, three quarters, every 8 steps": Idea(first=0.1, last=0.1, prompt=0.75, every=8),
}


@numba.njit(parallel=True, fastmath={"nsz", "arcp", "contract", "afn", "reassoc"})
def decode(q, k, v, context, score, protected, chance, held, counts, slots, recent, P, window, others, every):
    """Feed the tokens behind prompts one by one, and evict. q and context (B, KV, G, N, D), k and v (B, KV, N, D),
    score, protected and chance (B, KV, N), which replaces ranks where it is not zero. held (B, KV, N): the kept tokens
    of the prompts, counts (B, KV) of them. slots and recent (KV,)."""
    B, KV, G, N, D = q.shape
    for head in numba.prange(B * KV):
        b = head // KV
        h = head % KV
        places = held[b, h].copy()
        count = counts[b, h]
        weights = np.empty((G, N), np.float32)
        for t in range(P, N):
            places[count] = t
            count += 1
            for g in range(G):
                most = np.float32(-np.inf)
                for i in range(count):
                    dot = np.float32(0)
                    for d in range(D):
                        dot += q[b, h, g, t, d] * k[b, h, places[i], d]
                    weights[g, i] = dot
                    most = max(most, dot)
                total = np.float32(0)
                for i in range(count):
                    weights[g, i] = np.exp(weights[g, i] - most)
                    total += weights[g, i]
                out = context[b, h, g, t]
                out[:] = 0
                for i in range(count):
                    share = weights[g, i] / total
                    score[b, h, places[i]] += share
                    for d in range(D):
                        out[d] += share * v[b, h, places[i], d]
            if (t + 1 - P) % every:
                continue
            while count > slots[h] - (every - 1):
                worst = np.inf
                goes = -1
                for i in range(count):
                    p = places[i]
                    if p > t - recent[h] or protected[b, h, p]:
                        continue
                    voted = t + 1 - max(p, P - window)
                    rank = score[b, h, p] / (voted + others * (t + 1 - p - voted))
                    if chance[b, h, p] > 0:
                        rank = chance[b, h, p]
                    if rank < worst:
                        worst = rank
                        goes = i
                places[goes : count - 1] = places[goes + 1 : count].copy()
                count -= 1


@dataclass
class Attention:
    """The attention of every layer under an idea. `by_head`: slots (L, KV)."""

    idea: Idea
    by_head: Tensor
    rule: VotedCache

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The context (B, H, N, D) of all tokens of texts."""
        B, KV, N, D = k.shape
        P = PROMPT
        dtype = q.dtype
        q = (q.float() * D**-0.5).view(B, KV, -1, N, D).contiguous()
        k, v = (x.float().contiguous() for x in (k, v))
        context = torch.empty_like(q)
        score = torch.zeros(B, KV, N)
        for b in range(B):
            context[b, :, :, :P], score[b, :, :P] = self._prompt(q[b, :, :, :P], k[b, :, None, :P], v[b, :, None, :P])
        slots = self.by_head[layer]
        recent = (slots // 2).clamp(min=1)
        held, counts, protected, chance = self._kept(score, slots, recent)
        tensors = (q, k, v, context, score, protected, chance, held, counts, slots, recent)
        rule = (P, self.rule.window, np.float32(self.rule.others), self.idea.every)
        decode(*(x.numpy() for x in tensors), *rule)
        return context.view(B, -1, N, D).to(dtype)

    def _prompt(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Context (KV, G, P, D) and scores (KV, P) of a prompt."""
        future = torch.ones(PROMPT, PROMPT, dtype=torch.bool).triu(1)
        p = (q @ k.transpose(-1, -2)).masked_fill_(future, -inf).softmax(-1)
        received = p.sum(1)
        votes = received[:, -self.rule.window :].sum(1)
        pooled = F.max_pool1d(votes, self.rule.pool, 1, self.rule.pool // 2)
        return p @ v, pooled + self.rule.others * (received.sum(1) - votes)

    def _kept(self, score: Tensor, slots: Tensor, recent: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """held, counts, protected and chance, as for `decode`."""
        B, KV, N = score.shape
        position = torch.arange(N)
        rule = self.rule
        voted = PROMPT - position.clamp(min=PROMPT - rule.window)
        rank = score / (voted + rule.others * (PROMPT - position - voted)).clamp(min=1e-6)
        chance = torch.zeros_like(score)
        if self.idea.is_random:
            chance = torch.rand(score.shape, generator=torch.Generator().manual_seed(0)).add_(0.1)
            rank = chance
        first = (self.idea.first * slots).int()[:, None]
        last = (self.idea.last * slots).int()[:, None]
        protected = (position < first) | ((position >= PROMPT - last) & (position < PROMPT))
        is_recent = position >= PROMPT - recent[:, None]
        stays = protected | is_recent
        rank = torch.where(stays, inf, rank).masked_fill_(position >= PROMPT, -inf)
        order = rank.sort(dim=-1, descending=True, stable=True).indices
        counts = (self.idea.prompt * slots).round().long()
        counts = torch.minimum(counts, slots - (self.idea.every - 1)).clamp(min=1).expand(B, KV).contiguous()
        taken = position < counts[..., None]
        held = torch.where(taken, order, N).sort(-1).values.clamp(max=N - 1)
        protected = protected.expand(B, KV, N).contiguous()
        if self.idea.apart:
            protected.scatter_(2, order, taken).masked_fill_(is_recent, False)
        return held, counts, protected, chance


@torch.inference_mode()
def logprobs(model: LayerModel, ids: Tensor, attention: Attention | None, shown) -> list[float]:
    """The mean log-probability of the tokens behind the prompt, of each text ids (B, N)."""
    full = lambda layer, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    found = []
    for part in ids.split(TEXTS):
        hidden = model.run(part, 0, attention or full)
        found += model.logprobs(hidden[:, PROMPT - 1 : -1], part[:, PROMPT:]).mean(1).tolist()
        shown.update(len(part))
    return found


def run(args: argparse.Namespace) -> None:
    with LLM(progress=False) as llm:
        sources = [read_source(path) for path in args.texts]
        passages = [p for s in sources for p in passages_of(s, llm.model, PROMPT, GENERATED, args.windows)[0]]
        ids = torch.tensor([p.token_ids for p in passages])
        budgets = {slots: by_head(llm, slots) for slots in args.slots}
        texts = [Path(path).stem for path in args.texts]
        workload = {"model": llm.model.name, "dtype": dtype_name(llm.dtype), "texts": texts, "passages": len(passages)}
        result = origin(args) | {"workload": workload, "rows": []}
        layers = LayerModel(llm.model, progress=False)
        with bar(desc="measuring", total=(1 + len(IDEAS) * len(budgets)) * len(ids), unit="texts", leave=True) as shown:
            measure = partial(logprobs, layers, ids, shown=shown)
            full = measure(attention=None)
            for name, idea in IDEAS.items():
                row = {"idea": name}
                for slots, budget in budgets.items():
                    alike = ((slots,) * llm.spec.kv_heads,) * llm.spec.layers
                    shared = torch.tensor(budget.by_head if idea.by_head else alike)
                    row[f"slots_{slots}"] = loss_of(full, measure(attention=Attention(idea, shared, VotedCache(1, 1))))
                result["rows"].append(row)
                write_text("--output", args.output, to_json(rounded(result, 4)) + "\n")
        full = engine(llm, passages, None)
        for slots, budget in budgets.items():
            result.setdefault("engine", {})[f"slots_{slots}"] = loss_of(full, engine(llm, passages, budget))
        write_text("--output", args.output, to_json(rounded(result, 4)) + "\n")


def by_head(llm: LLM, slots: int) -> KVBudget:
    """The budget with the slots of each head as a job of the engine has them."""
    workload = Workload((PROMPT,), GENERATED)
    budget = KVBudget.from_ratio(slots / 2 / PROMPT, rule=RULE)
    llm.head_slots.measure(budget, workload)
    return llm.head_slots.shared(budget, workload)


def engine(llm: LLM, passages: list, budget: KVBudget | None) -> list[float]:
    """The same by the engine."""
    llm.kv_budget = budget
    return [logprob([score]) for score in llm.score([p.token_ids for p in passages], PROMPT)]


def loss_of(full: list[float], found: list[float]) -> dict:
    """The rise of the perplexity over the full cache's, and its standard error over texts."""
    lost = np.array(full) - np.array(found)
    rise = float(np.exp(lost.mean())) - 1
    return {"rise": rise, "error": (1 + rise) * standard_error(lost.tolist())}


if __name__ == "__main__":
    parser = Parser("python -m bench.budget_ideas", "Measure ideas around a KV budget.")
    parser.add_argument("texts", nargs="+", metavar="TEXT")
    parser.add_argument("--slots", type=int, nargs="+", default=[204, 102])
    parser.add_argument("--windows", type=int, default=2, help="passages of a text")
    parser.add_argument("--output", required=True)
    sys.exit(execute(parser, run))
