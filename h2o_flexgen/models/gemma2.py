"""Gemma 2 (arXiv 2408.00118): LLaMA's matrices, four norms a block, soft caps, and a window in every other layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from h2o_flexgen.models import llama
from h2o_flexgen.models.llama import LlamaSpec
from h2o_flexgen.models.parts import Attend, Gather, Weights, attention, centred_rms_norm, mlp, project
from h2o_flexgen.models.rope import Positions
from h2o_flexgen.models.spec import FULL, SLIDING, Config, Layer, of_layers, vectors

#: as in `llama.SIZES`, then query_pre_attn_scalar
SIZES = {
    "google/gemma-2-2b": (26, 2304, 9216, 8, 4, 256, 256000, 8192, 1e4, True, 256),
    "google/gemma-2-9b": (42, 3584, 14336, 16, 8, 256, 256000, 8192, 1e4, True, 256),
    "google/gemma-2-27b": (46, 4608, 36864, 32, 16, 128, 256000, 8192, 1e4, True, 144),
}
DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


@dataclass(frozen=True)
class GemmaSpec(LlamaSpec):
    final_cap: float | None = None  # of the head's logits, as `cap` is of attention's


def gemma_spec(config: Config, **changes) -> GemmaSpec:
    """The spec of any Gemma, as if no layer had a window; `changes` override fields."""
    if config.data.get("use_bidirectional_attention"):
        raise config.error("attention to later tokens (use_bidirectional_attention) is not supported")
    read = llama.spec(
        config,
        activation=config.text("hidden_activation", "gelu_pytorch_tanh"),
        eos=config.tokens("eos_token_id", 1),
        tied=config.flag("tie_word_embeddings", True),
        mlp_bias=False,
        window=None,
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
    )
    return replace(GemmaSpec(**vars(read), final_cap=cap(config, "final_logit_softcapping")), **changes)


def cap(config: Config, key: str) -> float | None:
    """A soft cap; None for null."""
    return None if config.data.get(key) is None else config.number(key)


def spec(config: Config) -> GemmaSpec:
    config = Config(DEFAULTS | config.data, config.where)
    read = gemma_spec(config, model_type="gemma2", cap=cap(config, "attn_logit_softcapping"))
    by_type = {FULL: read, SLIDING: replace(read, window=config.window(4096))}
    return of_layers([by_type[kind] for kind in config.layer_types(lambda index: index % 2 == 0)])


def configs(sizes: dict[str, tuple], **more) -> dict[str, dict]:
    """{name: config} of rows like those of SIZES, and of the models that follow instructions."""
    found = llama.configs({name: row[:-1] for name, row in sizes.items()}, **more)
    found = {name: config | {"query_pre_attn_scalar": sizes[name][-1]} for name, config in found.items()}
    return found | {name.removesuffix("-pt") + "-it": config for name, config in found.items()}


def named() -> dict[str, dict]:
    return configs(SIZES)


def tensors(spec: GemmaSpec) -> list[Layer]:
    words, *blocks, head = llama.tensors(spec)
    return [words, *(_with_norms(spec, index, block) for index, block in enumerate(blocks)), head]


def _with_norms(spec: GemmaSpec, index: int, block: Layer) -> Layer:
    """LLaMA's block with a norm before and one after each of attention and MLP."""
    at = f"model.layers.{index}"
    return Layer(
        block.streamed
        | vectors("attn_post_norm", f"{at}.post_attention_layernorm", spec.hidden)
        | vectors("mlp_norm", f"{at}.pre_feedforward_layernorm", spec.hidden)
        | vectors("mlp_post_norm", f"{at}.post_feedforward_layernorm", spec.hidden)
    )


def embed(spec: GemmaSpec, w: Weights, gather: Gather, ids: Tensor, positions: Positions) -> Tensor:
    words = gather("words", ids)
    return words.mul_(torch.tensor(spec.hidden**0.5).to(words.dtype).item())  # the factor is rounded too


def block(spec: GemmaSpec, w: Weights, hidden: Tensor, positions: Positions | None, attend: Attend) -> Tensor:
    norm = partial(centred_rms_norm, w, eps=spec.eps)
    x = norm("attn_norm", hidden)
    x = attention(spec, w, x, positions, attend, norm if spec.head_norms else None)
    hidden = norm("attn_post_norm", x).add_(hidden)
    x = mlp(spec, w, norm("mlp_norm", hidden))
    return norm("mlp_post_norm", x).add_(hidden)


def final_states(spec: GemmaSpec, w: Weights, hidden: Tensor) -> Tensor:
    return centred_rms_norm(w, "final_norm", hidden, spec.eps)


def logits(spec: GemmaSpec, w: Weights, hidden: Tensor) -> Tensor:
    return head(spec, w, final_states(spec, w, hidden))


def head(spec: GemmaSpec, w: Weights, x: Tensor) -> Tensor:
    """Logits (B, V) from normed states x (B, E)."""
    found = project(w, "head", x)
    return found if spec.final_cap is None else found.div_(spec.final_cap).tanh_().mul_(spec.final_cap)
