"""Mistral (arXiv 2310.06825): LLaMA's blocks, with a sliding window in its first versions."""

from __future__ import annotations

from h2o_flexgen.models import llama
from h2o_flexgen.models.llama import LlamaSpec, block, embed, logits, rotate, tensors
from h2o_flexgen.models.spec import Config

__all__ = ["block", "embed", "logits", "named", "rotate", "spec", "tensors"]

#: as in `llama.SIZES`
SIZES = {
    "mistralai/Mistral-7B-v0.3": (32, 4096, 14336, 32, 8, 128, 32768, 32768, 1e6, False),
}


def spec(config: Config) -> LlamaSpec:
    window = config.data.get("sliding_window", 4096)
    return llama.spec(
        config,
        model_type="mistral",
        kv_heads=8,
        default_positions=131072,
        window=None if window is None else config.size("sliding_window", 4096),
    )


def named() -> dict[str, dict]:
    return {name: llama.config_of(sizes, rms_norm_eps=1e-5, sliding_window=None) for name, sizes in SIZES.items()}
