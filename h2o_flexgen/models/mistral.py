"""Mistral (arXiv 2310.06825): LLaMA's blocks, in its first versions with a sliding window."""

from __future__ import annotations

from h2o_flexgen.models import llama
from h2o_flexgen.models.llama import LlamaSpec, block, embed, final_states, logits, tensors
from h2o_flexgen.models.spec import Config

__all__ = ["block", "embed", "final_states", "logits", "named", "spec", "tensors"]

#: as in `llama.SIZES`
SIZES = {
    "mistralai/Mistral-7B-v0.3": (32, 4096, 14336, 32, 8, 128, 32768, 32768, 1e6, False),
}


def spec(config: Config) -> LlamaSpec:
    return llama.spec(config, model_type="mistral", kv_heads=8, default_positions=131072, window=config.window(4096))


def named() -> dict[str, dict]:
    return llama.configs(SIZES, rms_norm_eps=1e-5, sliding_window=None)
