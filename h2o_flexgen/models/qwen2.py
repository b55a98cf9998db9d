"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): LLaMA's blocks with biases for queries, keys and values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

from h2o_flexgen.models import llama
from h2o_flexgen.models.llama import LlamaSpec, block, embed, final_states, logits, tensors
from h2o_flexgen.models.spec import MOST_LAYERS, SLIDING, Config, of_layers

__all__ = ["block", "embed", "final_states", "logits", "named", "spec", "tensors"]

#: as in `llama.SIZES`
SIZES = {
    "Qwen/Qwen2.5-0.5B": (24, 896, 4864, 14, 2, 64, 151936, 32768, 1e6, True),
    "Qwen/Qwen2.5-1.5B": (28, 1536, 8960, 12, 2, 128, 151936, 131072, 1e6, True),
    "Qwen/Qwen2.5-3B": (36, 2048, 11008, 16, 2, 128, 151936, 32768, 1e6, True),
    "Qwen/Qwen2.5-7B": (28, 3584, 18944, 28, 4, 128, 152064, 131072, 1e6, False),
    "Qwen/Qwen2.5-14B": (48, 5120, 13824, 40, 8, 128, 152064, 131072, 1e6, False),
    "Qwen/Qwen2.5-32B": (64, 5120, 27648, 40, 8, 128, 152064, 131072, 1e6, False),
    "Qwen/Qwen2.5-72B": (80, 8192, 29568, 64, 8, 128, 152064, 131072, 1e6, False),
}


def windows(config: Config, slides: Callable[[int, int], bool] = operator.ge) -> list[int | None]:
    """The sliding window of each layer of a Qwen config. `slides`: whether a layer has one, given its index and
    `max_window_layers`, where the config does not say."""
    if not config.flag("use_sliding_window", False):
        return [None] * config.size("num_hidden_layers", most=MOST_LAYERS)
    full = config.size("max_window_layers", 28, least=0)
    types = config.layer_types(lambda layer: slides(layer, full))
    window = config.window(4096) if SLIDING in types else None
    return [window if kind == SLIDING else None for kind in types]


def qwen_spec(config: Config, **changes) -> LlamaSpec:
    """The spec of a dense Qwen; `changes` as in `llama.spec`."""
    eos = config.tokens("eos_token_id")
    found = llama.spec(config, kv_heads=32, default_positions=32768, eos=eos, **changes)
    return of_layers([replace(found, window=window) for window in windows(config)])


def spec(config: Config) -> LlamaSpec:
    return qwen_spec(config, model_type="qwen2", qkv_bias=True, out_bias=False)


def named() -> dict[str, dict]:
    return llama.configs(SIZES, rms_norm_eps=1e-6)
