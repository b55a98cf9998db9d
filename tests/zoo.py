"""Tiny OPT models with random weights that make the tokens vary, and prompts whose reference is not a close call."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from oracle import Oracle, Trace

#: the least that must lie between the best and the second best logit, and between a score that stays and one that
#: goes, for fp32 sums in another order to give the same tokens
MARGIN, SLACK = 2e-3, 1e-5
#: the most by which transformers' own logarithms of probabilities in fp32, token by token, may be off
NOISE = 2e-5

BASE = dict(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=2,
    ffn_dim=64,
    num_attention_heads=4,
    max_position_embeddings=128,
    word_embed_proj_dim=32,
)
CONFIGS = {
    "opt": dict(num_hidden_layers=3),
    "post_norm": dict(do_layer_norm_before=False),
    "350m_style": dict(do_layer_norm_before=False, word_embed_proj_dim=20),
    "pre_norm_projected": dict(word_embed_proj_dim=12),
    "widened_embedding": dict(word_embed_proj_dim=48),
    "no_bias": dict(enable_bias=False),
    "no_affine": dict(layer_norm_elementwise_affine=False),
    "post_norm_no_affine": dict(do_layer_norm_before=False, layer_norm_elementwise_affine=False),
    "galactica": dict(
        activation_function="gelu", enable_bias=False, layer_norm_elementwise_affine=False, tie_word_embeddings=True
    ),
    "gelu_new": dict(activation_function="gelu_new"),
    "silu": dict(activation_function="silu"),
    "untied": dict(tie_word_embeddings=False),
    "untied_projected": dict(tie_word_embeddings=False, word_embed_proj_dim=24, do_layer_norm_before=False),
    "no_final_norm": dict(_remove_final_layer_norm=True),
    "odd_vocab": dict(vocab_size=77),
    "one_layer": dict(num_hidden_layers=1),
    "deep": dict(num_hidden_layers=6, hidden_size=16, word_embed_proj_dim=16, num_attention_heads=2, ffn_dim=32),
    "one_head": dict(num_attention_heads=1),
    "heads_of_one": dict(num_attention_heads=32),
    "odd_sizes": dict(hidden_size=21, word_embed_proj_dim=21, num_attention_heads=3, ffn_dim=35),
    "narrow_ffn": dict(ffn_dim=10),
}


@dataclass
class Tiny:
    """A tiny model: transformers' and, in `folder`, its checkpoint."""

    name: str
    hf: object
    folder: Path
    _references: dict = field(default_factory=dict)
    _noises: dict = field(default_factory=dict)

    def __post_init__(self):
        self.oracle = Oracle(self.hf)

    @property
    def vocab_size(self) -> int:
        return self.hf.config.vocab_size

    def prompts(self, lengths, seed: int = 0) -> list[list[int]]:
        rng = random.Random(f"{self.name} {seed}")
        return [[rng.randrange(self.vocab_size) for _ in range(n)] for n in lengths]

    def reference(self, prompt: list[int], max_tokens: int, heavy=None, recent=None) -> Trace:
        key = (tuple(prompt), max_tokens, heavy, recent)
        if key not in self._references:
            self._references[key] = self.oracle.generate(prompt, max_tokens, heavy, recent)
        return self._references[key]

    def references(self, prompts, max_tokens: int, heavy=None, recent=None) -> list[Trace]:
        return [self.reference(p, max_tokens, heavy, recent) for p in prompts]

    def clear_cut_prompts(self, lengths, max_tokens: int, budgets=((None, None),)) -> list[list[int]]:
        """Prompts of these lengths for which no decision of the reference is a close call, under any of the
        (heavy, recent) budgets."""
        return [self._clear_cut(n, place, max_tokens, budgets) for place, n in enumerate(lengths)]

    def _clear_cut(self, length: int, place: int, max_tokens: int, budgets) -> list[int]:
        for seed in range(100):
            (prompt,) = self.prompts([length], seed=1000 * place + seed)
            traces = [self.reference(prompt, max_tokens, *budget) for budget in budgets]
            varied = all(len(set(t.tokens)) > min(3, max_tokens // 4) for t in traces)
            clear = varied and all(t.margin > MARGIN and t.slack > SLACK for t in traces)
            if clear and self._noise(prompt, max_tokens) < NOISE:
                return prompt
        raise AssertionError(f"{self.name}: no clear-cut prompt of {length} tokens")

    def _noise(self, prompt: list[int], max_tokens: int) -> float:
        """How far from the reference, in fp64, the same sums in fp32 come: some tokens magnify every rounding."""
        key, given, past = (tuple(prompt), max_tokens), prompt, None
        if key in self._noises:
            return self._noises[key]
        trace, worst = self.reference(prompt, max_tokens), 0.0
        with torch.inference_mode():
            for token, logprob in zip(trace.tokens, trace.logprobs):
                out = self.hf(torch.tensor([given]), past_key_values=past, use_cache=True)
                worst = max(worst, abs(float(out.logits[0, -1].log_softmax(-1)[token]) - logprob))
                given, past = [token], out.past_key_values
        self._noises[key] = worst
        return worst


def build(name: str, folder: Path, seed: int = 0, **changes) -> Tiny:
    """Make the model `name` of CONFIGS, with `changes` to its configuration, and save it."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(**{**BASE, "init_std": 0.4, "eos_token_id": 2, **CONFIGS.get(name, {}), **changes})
    torch.manual_seed(seed)
    model = OPTForCausalLM(config).float().eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if key.endswith("bias"):
                tensor.normal_(0, 0.1)
            elif "layer_norm" in key:
                tensor.normal_(1, 0.3)
            elif "embed" in key:
                tensor.normal_(0, 0.8)
            else:
                tensor.normal_(0, 0.5)
    model.save_pretrained(folder)
    return Tiny(name, model, folder)
