"""Qwen3, dense (arXiv 2505.09388): LLaMA's blocks with a norm for each head's queries and keys."""

from __future__ import annotations

from h2o_flexgen.models import llama
from h2o_flexgen.models.llama import LlamaSpec, block, embed, final_states, logits, tensors
from h2o_flexgen.models.qwen2 import qwen_spec
from h2o_flexgen.models.spec import Config

__all__ = ["block", "embed", "final_states", "logits", "named", "spec", "tensors"]

#: as in `llama.SIZES`
SIZES = {
    "Qwen/Qwen3-0.6B": (28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e6, True),
    "Qwen/Qwen3-1.7B": (28, 2048, 6144, 16, 8, 128, 151936, 40960, 1e6, True),
    "Qwen/Qwen3-4B": (36, 2560, 9728, 32, 8, 128, 151936, 40960, 1e6, True),
    "Qwen/Qwen3-8B": (36, 4096, 12288, 32, 8, 128, 151936, 40960, 1e6, False),
    "Qwen/Qwen3-14B": (40, 5120, 17408, 40, 8, 128, 151936, 40960, 1e6, False),
    "Qwen/Qwen3-32B": (64, 5120, 25600, 64, 8, 128, 151936, 40960, 1e6, False),
}


def spec(config: Config) -> LlamaSpec:
    return qwen_spec(config, model_type="qwen3", head_dim=128, head_norms=True)


def named() -> dict[str, dict]:
    return llama.configs(SIZES, rms_norm_eps=1e-6)
