"""Qwen3, dense (arXiv 2505.09388): LLaMA's blocks with a norm for each head's queries and keys."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from h2o_flexgen.models import llama
from h2o_flexgen.models.llama import LlamaSpec, embed, logits, rotate
from h2o_flexgen.models.parts import Attend, Weights, gated_mlp, merge_heads, position, project, rms_norm, split_heads
from h2o_flexgen.models.qwen2 import window
from h2o_flexgen.models.spec import Config, Layer, vectors

__all__ = ["block", "embed", "logits", "named", "rotate", "spec", "tensors"]

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
    return llama.spec(
        config,
        model_type="qwen3",
        kv_heads=32,
        head_dim=128,
        default_positions=32768,
        eos=config.tokens("eos_token_id"),
        window=window(config, config.size("num_hidden_layers")),
    )


def named() -> dict[str, dict]:
    return {name: llama.config_of(sizes, rms_norm_eps=1e-6) for name, sizes in SIZES.items()}


def tensors(spec: LlamaSpec) -> list[Layer]:
    def norms(index: int) -> dict:
        at = f"model.layers.{index}.self_attn"
        return vectors("q_norm", f"{at}.q_norm", spec.head_dim) | vectors("k_norm", f"{at}.k_norm", spec.head_dim)

    first, *blocks, last = llama.tensors(spec)
    return [first, *(replace(b, streamed=b.streamed | norms(n)) for n, b in enumerate(blocks)), last]


def block(spec: LlamaSpec, w: Weights, hidden: Tensor, positions: Tensor | None, attend: Attend) -> Tensor:
    x = rms_norm(w, "attn_norm", hidden, spec.eps)
    q, k, v = (split_heads(project(w, n, x), h) for n, h in zip("qkv", (spec.heads, spec.kv_heads, spec.kv_heads)))
    q = position(spec, rms_norm(w, "q_norm", q, spec.eps), positions)
    k = position(spec, rms_norm(w, "k_norm", k, spec.eps), positions)
    hidden = project(w, "out", merge_heads(attend(q, k, v))).add_(hidden)
    x = rms_norm(w, "mlp_norm", hidden, spec.eps)
    return gated_mlp(spec, w, x).add_(hidden)
