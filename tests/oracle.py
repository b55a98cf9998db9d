"""H2O, with sets and masks: one prompt at a time, the whole history kept, nothing clever.

Written from the paper and from transformers' OPT, without a look at the engine: its own attention, its own layer
norm, a Python set of kept positions per layer and head. Slow and easy to check. Also full attention (`heavy=None`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Trace:
    """What became of one prompt.

    Attributes:
        margins: per token, how far its logit is above the second best.
        slack: the smallest difference in score that decided which token stays or goes.
        kept: per step (0 is prefill), layer and head: the positions kept at the end of the step.
        evicted: per layer and head: how many tokens were dropped.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    slack: float = float("inf")
    kept: list[list[list[frozenset[int]]]] = field(default_factory=list)
    evicted: list[list[int]] = field(default_factory=list)

    @property
    def margin(self) -> float:
        return min(self.margins)


def choose_kept(score: list[float], heavy: int, recent: int) -> tuple[set[int], float]:
    """Positions that prefill keeps of len(score) tokens, and the smallest gap between a kept and a dropped score."""
    n = len(score)
    everything = set(range(n))
    if n <= heavy + recent:
        return everything, float("inf")
    window = set(range(n - recent, n))
    others = sorted(everything - window, key=lambda j: (-score[j], j))
    best, rest = others[:heavy], others[heavy:]
    gap = score[best[-1]] - score[rest[0]] if best else float("inf")
    return window | set(best), gap


def choose_evicted(kept: set[int], score, now: int, heavy: int, recent: int) -> tuple[int | None, float]:
    """The token that goes after a step whose new token is at position `now`, and the gap to the next worst."""
    if len(kept) <= heavy + recent:
        return None, float("inf")
    outside = sorted((j for j in kept if j <= now - recent), key=lambda j: (score[j], j))
    gap = score[outside[1]] - score[outside[0]] if len(outside) > 1 else float("inf")
    return outside[0], gap


class Oracle:
    """Generates with the weights of a transformers OPTForCausalLM, in `dtype`."""

    def __init__(self, model, dtype: torch.dtype = torch.float64):
        self.config = model.config
        self.dtype = dtype
        self.w = {name.removeprefix("model.decoder."): t.detach().to(dtype) for name, t in model.state_dict().items()}
        self.act = model.model.decoder.layers[0].activation_fn
        if self.config.tie_word_embeddings:
            self.w["lm_head.weight"] = self.w["embed_tokens.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)
        return x * self.w[f"{name}.weight"] + self.w[f"{name}.bias"] if f"{name}.weight" in self.w else x

    @torch.no_grad()
    def generate(
        self, prompt: list[int], max_tokens: int, heavy: int | None = None, recent: int | None = None
    ) -> Trace:
        config = self.config
        L, H = config.num_hidden_layers, config.num_attention_heads
        self.heavy, self.recent, self.trace = heavy, recent, Trace(evicted=[[0] * H for _ in range(L)])
        self.k = [None] * L
        self.v = [None] * L
        self.score = [[{} for _ in range(H)] for _ in range(L)]
        self.kept = [[set() for _ in range(H)] for _ in range(L)]
        fed, first = list(prompt), 0
        for _ in range(max_tokens):
            logits = self._forward(fed, first)
            first += len(fed)
            best = torch.sort(logits, descending=True, stable=True)
            token = int(best.indices[0])
            self.trace.tokens.append(token)
            self.trace.logprobs.append(float(torch.log_softmax(logits, 0)[token]))
            self.trace.margins.append(float(best.values[0] - best.values[1]))
            self.trace.kept.append([[frozenset(kept) for kept in layer] for layer in self.kept])
            fed = [token]
        return self.trace

    def _forward(self, tokens: list[int], first: int) -> Tensor:
        """Logits after the last of `tokens`, whose first one is at position `first`."""
        x = self.w["embed_tokens.weight"][tokens]
        if "project_in.weight" in self.w:
            x = self.linear("project_in", x)
        x = x + self.w["embed_positions.weight"][[2 + first + t for t in range(len(tokens))]]
        before = self.config.do_layer_norm_before
        for layer in range(self.config.num_hidden_layers):
            at = f"layers.{layer}"
            y = self.norm(f"{at}.self_attn_layer_norm", x) if before else x
            x = x + self.linear(f"{at}.self_attn.out_proj", self._attention(layer, y, first))
            x = x if before else self.norm(f"{at}.self_attn_layer_norm", x)
            y = self.norm(f"{at}.final_layer_norm", x) if before else x
            x = x + self.linear(f"{at}.fc2", self.act(self.linear(f"{at}.fc1", y)))
            x = x if before else self.norm(f"{at}.final_layer_norm", x)
        x = x[-1]
        if before and not self.config._remove_final_layer_norm:
            x = self.norm("final_layer_norm", x)
        if "project_out.weight" in self.w:
            x = self.linear("project_out", x)
        return self.w["lm_head.weight"] @ x

    def _attention(self, layer: int, x: Tensor, first: int) -> Tensor:
        H = self.config.num_attention_heads
        q, k, v = (self.linear(f"layers.{layer}.self_attn.{p}_proj", x).view(len(x), H, -1) for p in "qkv")
        self.k[layer] = k if first == 0 else torch.cat([self.k[layer], k])
        self.v[layer] = v if first == 0 else torch.cat([self.v[layer], v])
        step = self._prompt_head if first == 0 else self._token_head
        heads = [step(layer, h, q[:, h], self.k[layer][:, h], self.v[layer][:, h]) for h in range(H)]
        return torch.cat(heads, -1)

    def _prompt_head(self, layer: int, h: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = len(q)
        logits = q @ k.T / q.shape[-1] ** 0.5
        logits[torch.arange(n)[None, :] > torch.arange(n)[:, None]] = float("-inf")
        p = torch.softmax(logits, -1)
        if self.heavy is not None:
            score = p.sum(0).tolist()
            kept, gap = choose_kept(score, self.heavy, self.recent)
            self.trace.slack = min(self.trace.slack, gap)
            self.trace.evicted[layer][h] += n - len(kept)
            self.kept[layer][h] = kept
            self.score[layer][h] = dict(enumerate(score))
        else:
            self.kept[layer][h] = set(range(n))
        return p @ v

    def _token_head(self, layer: int, h: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        now = len(k) - 1
        kept, score = self.kept[layer][h], self.score[layer][h]
        kept.add(now)
        seen = torch.tensor([j in kept for j in range(now + 1)])
        logits = (q[0] @ k.T / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
        p = torch.softmax(logits, -1)
        if self.heavy is not None:
            given = p.tolist()
            for j in kept:
                score[j] = score.get(j, 0.0) + given[j]
            goes, gap = choose_evicted(kept, score, now, self.heavy, self.recent)
            if goes is not None:
                kept.remove(goes)
                self.trace.slack = min(self.trace.slack, gap)
                self.trace.evicted[layer][h] += 1
        return (p @ v)[None]
