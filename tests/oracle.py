"""H2O, with sets and masks: one prompt at a time, the whole history kept, nothing clever.

Written from the papers and from transformers' models, without a look at the engine: its own attention, norms and
rotations, a Python set of kept positions per layer and KV head. Slow and easy to check. Also full attention
(`heavy=None`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Trace:
    """What became of one prompt.

    Attributes:
        greedy: the most likely token in the place of each of `tokens`.
        margins: per token, how far its logit is above the second best.
        slack: the smallest difference in score that decided which token stays or goes.
        kept: per step (0 is prefill), layer and KV head: the positions kept at the end of the step.
        evicted: per layer and KV head: how many tokens were dropped.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)
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


#: rule -> (what prefill keeps, what goes after a step)
CHOICES = {"h2o": (choose_kept, choose_evicted)}


def fresh_rotary(model):
    """A new rotary module of a transformers model, None if it has none: with dynamic RoPE a used one remembers the
    longest text that it has seen."""
    used = getattr(model.base_model, "rotary_emb", None)
    return None if used is None else type(used)(model.config)


class Oracle:
    """Generates with the weights of a transformers model, in `dtype`. Subclasses know the layers of a family.

    Shapes: n tokens of one sequence, H query heads, KV heads of K and V, D elements of a head.
    """

    prefix = "model."

    def __init__(self, model, dtype: torch.dtype = torch.float64):
        self.model, self.config = model, model.config
        self.dtype = dtype
        self.w = {name.removeprefix(self.prefix): t.detach().to(dtype) for name, t in model.state_dict().items()}
        self.layers, self.heads = self.config.num_hidden_layers, self.config.num_attention_heads
        self.kv_heads = getattr(self.config, "num_key_value_heads", None) or self.heads
        self.group = self.heads // self.kv_heads

    # what a family says

    def embed(self, tokens: list[int], positions: range) -> Tensor:
        raise NotImplementedError

    def block(self, layer: int, x: Tensor) -> Tensor:
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    # parts

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
        return x * self.w[f"{name}.weight"] + self.w[f"{name}.bias"] if f"{name}.weight" in self.w else x

    def rms_norm(self, name: str, x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.rms_norm_eps) * self.w[f"{name}.weight"]

    def rotate(self, x: Tensor) -> Tensor:
        """x (n, heads, D) at the positions of this step: of each head the first elements turn in pairs, the first with
        the one half of them further on, and so forth; those behind stay."""
        half = self.angles.shape[-1]
        cos, sin = (f(self.angles)[:, None] * self.scale for f in (torch.cos, torch.sin))
        a, b = x[..., :half], x[..., half : 2 * half]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)

    # one prompt

    @torch.no_grad()
    def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        heavy: int | None = None,
        recent: int | None = None,
        rule: str = "h2o",
        forced: list[int] | None = None,
    ) -> Trace:
        """The most likely tokens, or those of `forced`; `margins` are then how far each is above the best other."""
        L, KV = self.layers, self.kv_heads
        self.choose_kept, self.choose_evicted = CHOICES[rule]
        self.heavy, self.recent, self.trace = heavy, recent, Trace(evicted=[[0] * KV for _ in range(L)])
        self.rotary = fresh_rotary(self.model)
        self.k = [None] * L
        self.v = [None] * L
        self.score = [[{} for _ in range(KV)] for _ in range(L)]
        self.kept = [[set() for _ in range(KV)] for _ in range(L)]
        fed, first = list(prompt), 0
        for step in range(max_tokens):
            logits = self._forward(fed, first)
            first += len(fed)
            greedy = int(logits.argmax())
            token = greedy if forced is None else forced[step]
            others = torch.cat([logits[:token], logits[token + 1 :]])
            self.trace.tokens.append(token)
            self.trace.greedy.append(greedy)
            self.trace.logprobs.append(float(torch.log_softmax(logits, 0)[token]))
            self.trace.margins.append(float(logits[token] - others.max()))
            self.trace.kept.append([[frozenset(kept) for kept in layer] for layer in self.kept])
            fed = [token]
        return self.trace

    def _forward(self, tokens: list[int], first: int) -> Tensor:
        """Logits after the last of `tokens`, whose first one is at position `first`."""
        positions = range(first, first + len(tokens))
        if self.rotary is not None:
            self._turn(torch.tensor([list(positions)]))
        x = self.embed(tokens, positions)
        for layer in range(self.layers):
            x = self.block(layer, x)
        return self.logits(x[-1])

    def _turn(self, positions: Tensor) -> None:
        """The angles of this step, (n, pairs). Radians per position are transformers', at the length of the text."""
        self.rotary(torch.zeros(1), positions)
        self.angles = positions[0, :, None].to(self.dtype) * self.rotary.inv_freq.to(self.dtype)
        self.scale = self.rotary.attention_scaling

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (n, H, D), k and v (n, KV, D) of new tokens -> (n, H * D)."""
        is_prompt = self.k[layer] is None
        self.k[layer] = k if is_prompt else torch.cat([self.k[layer], k])
        self.v[layer] = v if is_prompt else torch.cat([self.v[layer], v])
        step = self._prompt_heads if is_prompt else self._token_heads
        contexts = []
        for h in range(self.kv_heads):
            group = [q[:, g] for g in range(h * self.group, (h + 1) * self.group)]
            contexts += step(layer, h, group, self.k[layer][:, h], self.v[layer][:, h])
        return torch.cat(contexts, -1)

    def _prompt_heads(self, layer: int, h: int, group: list[Tensor], k: Tensor, v: Tensor) -> list[Tensor]:
        """The query heads of KV head h."""
        n = len(k)
        future = torch.arange(n)[None, :] > torch.arange(n)[:, None]
        each = [torch.softmax((q @ k.T / q.shape[-1] ** 0.5).masked_fill(future, float("-inf")), -1) for q in group]
        if self.heavy is not None:
            score = sum(p.sum(0) for p in each).tolist()
            kept, gap = self.choose_kept(score, self.heavy, self.recent)
            self.trace.slack = min(self.trace.slack, gap)
            self.trace.evicted[layer][h] += n - len(kept)
            self.kept[layer][h] = kept
            self.score[layer][h] = dict(enumerate(score))
        else:
            self.kept[layer][h] = set(range(n))
        return [p @ v for p in each]

    def _token_heads(self, layer: int, h: int, group: list[Tensor], k: Tensor, v: Tensor) -> list[Tensor]:
        now = len(k) - 1
        kept, score = self.kept[layer][h], self.score[layer][h]
        kept.add(now)
        gone = torch.tensor([j not in kept for j in range(now + 1)])
        each = [torch.softmax((q[0] @ k.T / q.shape[-1] ** 0.5).masked_fill(gone, float("-inf")), -1) for q in group]
        if self.heavy is not None:
            given = sum(each).tolist()
            for j in kept:
                score[j] = score.get(j, 0.0) + given[j]
            goes, gap = self.choose_evicted(kept, score, now, self.heavy, self.recent)
            if goes is not None:
                kept.remove(goes)
                self.trace.slack = min(self.trace.slack, gap)
                self.trace.evicted[layer][h] += 1
        return [(p @ v)[None] for p in each]


class OptOracle(Oracle):
    """OPT."""

    prefix = "model.decoder."

    def __init__(self, model, dtype: torch.dtype = torch.float64):
        super().__init__(model, dtype)
        self.act = model.model.decoder.layers[0].activation_fn

    def embed(self, tokens, positions):
        x = self.w["embed_tokens.weight"][tokens]
        if "project_in.weight" in self.w:
            x = self.linear("project_in", x)
        return x + self.w["embed_positions.weight"][[2 + p for p in positions]]

    def block(self, layer, x):
        at, before = f"layers.{layer}", self.config.do_layer_norm_before
        y = self.norm(f"{at}.self_attn_layer_norm", x, 1e-5) if before else x
        q, k, v = (self.linear(f"{at}.self_attn.{p}_proj", y).view(len(x), self.heads, -1) for p in "qkv")
        x = x + self.linear(f"{at}.self_attn.out_proj", self.attention(layer, q, k, v))
        x = x if before else self.norm(f"{at}.self_attn_layer_norm", x, 1e-5)
        y = self.norm(f"{at}.final_layer_norm", x, 1e-5) if before else x
        x = x + self.linear(f"{at}.fc2", self.act(self.linear(f"{at}.fc1", y)))
        return x if before else self.norm(f"{at}.final_layer_norm", x, 1e-5)

    def logits(self, x):
        if self.config.do_layer_norm_before and not self.config._remove_final_layer_norm:
            x = self.norm("final_layer_norm", x, 1e-5)
        if "project_out.weight" in self.w:
            x = self.linear("project_out", x)
        return self.w["lm_head.weight"] @ x


class LlamaOracle(Oracle):
    """LLaMA and the families with its blocks; with norms of each head's queries and keys where there are such."""

    def __init__(self, model, dtype: torch.dtype = torch.float64):
        super().__init__(model, dtype)
        self.act = model.model.layers[0].mlp.act_fn

    def embed(self, tokens, positions):
        return self.w["embed_tokens.weight"][tokens]

    def block(self, layer, x):
        at, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        y = self.rms_norm(f"layers.{layer}.input_layernorm", x)
        q = self.linear(f"{at}.q_proj", y).view(len(x), self.heads, -1)
        k = self.linear(f"{at}.k_proj", y).view(len(x), self.kv_heads, -1)
        v = self.linear(f"{at}.v_proj", y).view(len(x), self.kv_heads, -1)
        if f"{at}.q_norm.weight" in self.w:
            q, k = self.rms_norm(f"{at}.q_norm", q), self.rms_norm(f"{at}.k_norm", k)
        x = x + self.linear(f"{at}.o_proj", self.attention(layer, self.rotate(q), self.rotate(k), v))
        y = self.rms_norm(f"layers.{layer}.post_attention_layernorm", x)
        gated = self.act(self.linear(f"{mlp}.gate_proj", y)) * self.linear(f"{mlp}.up_proj", y)
        return x + self.linear(f"{mlp}.down_proj", gated)

    def logits(self, x):
        return self.w["lm_head.weight"] @ self.rms_norm("norm", x)


class NeoXOracle(Oracle):
    """GPT-NeoX."""

    prefix = "gpt_neox."

    def __init__(self, model, dtype: torch.dtype = torch.float64):
        super().__init__(model, dtype)
        self.act = model.gpt_neox.layers[0].mlp.act

    def embed(self, tokens, positions):
        return self.w["embed_in.weight"][tokens]

    def block(self, layer, x):
        at, eps = f"layers.{layer}", self.config.layer_norm_eps
        mixed = self.linear(f"{at}.attention.query_key_value", self.norm(f"{at}.input_layernorm", x, eps))
        D = x.shape[-1] // self.heads
        # one head after the other, and of each its query, key and value
        q, k, v = mixed.view(len(x), self.heads, 3 * D).split(D, -1)
        y = x + self.linear(f"{at}.attention.dense", self.attention(layer, self.rotate(q), self.rotate(k), v))
        z = self.norm(f"{at}.post_attention_layernorm", x if self.config.use_parallel_residual else y, eps)
        return y + self.linear(f"{at}.mlp.dense_4h_to_h", self.act(self.linear(f"{at}.mlp.dense_h_to_4h", z)))

    def logits(self, x):
        return self.w["lm_head.weight"] @ self.norm("final_layer_norm", x, self.config.layer_norm_eps)


#: families whose blocks are not LLaMA's
ORACLES = {"opt": OptOracle, "gpt_neox": NeoXOracle}


def oracle_of(model) -> Oracle:
    """The oracle with the weights of a transformers model."""
    return ORACLES.get(model.config.model_type, LlamaOracle)(model)
