"""A model whose layers differ in all that attention may differ in: scale, soft cap, sliding window, sinks, RoPE, KV
heads, size of a head. LLaMA's blocks around it; no such checkpoint exists, and transformers knows none."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import zoo
from oracle import LlamaOracle
from safetensors.torch import save_file

from h2o_flexgen.models import llama
from h2o_flexgen.models.spec import Layer, of_layers

#: of each layer
WINDOWS = [5, None, 9, None]
THETAS = [1e4, 5e5, 1e4, 5e5]
KV_HEADS = [2, 1, 2, 4]
HEAD_DIMS = [8, 12, 8, 8]
SINKS = [True, True, False, False]
CAPS = [None, 3.0, 3.0, None]
SCALES = [0.2, None, None, 0.5]
HEADS = 4
EPS = 1e-6

read_spec = llama.spec
tensors_of = llama.tensors


def spec(config, **changes):
    """In place of `llama.spec`."""
    found = read_spec(config, **changes)
    return of_layers([_layer(found, *each) for each in zip(WINDOWS, THETAS, KV_HEADS, HEAD_DIMS, CAPS, SCALES)])


def _layer(found, window, theta, kv_heads, head_dim, cap, scale):
    rope = replace(found.rope, theta=theta, dim=head_dim)
    own = replace(found, window=window, rope=rope, kv_heads=kv_heads, head_dim=head_dim)
    return replace(own, cap=cap, scale=scale)


def tensors(spec) -> list[Layer]:
    """In place of `llama.tensors`."""
    layers = tensors_of(spec)
    for n, has_sinks in enumerate(SINKS):
        layers[n + 1] = tensors_of(spec.at(n))[n + 1]
        if has_sinks:
            sinks = {"sinks": (f"model.layers.{n}.self_attn.sinks", (HEADS,))}
            layers[n + 1] = replace(layers[n + 1], streamed=layers[n + 1].streamed | sinks)
    return layers


class MixedOracle(LlamaOracle):
    """Its layers, one by one."""

    layer = 0
    positions = torch.zeros(1, 1)

    def __init__(self, model, dtype: torch.dtype = torch.float64):
        super().__init__(model, dtype)
        self.kv_heads_of = KV_HEADS
        self.sights = [window or float("inf") for window in WINDOWS]

    def turn_to(self, positions):
        self.positions = positions
        half = HEAD_DIMS[self.layer] // 2
        pairs = torch.arange(half, dtype=self.dtype) / half
        self.angles = positions[0, :, None].to(self.dtype) * THETAS[self.layer] ** -pairs
        self.scale = 1.0

    def block(self, layer, x):
        self.layer = layer
        self.turn_to(self.positions)
        self.cap = CAPS[layer]
        self.scale_base = SCALES[layer] and SCALES[layer] ** -2
        return super().block(layer, x)


@dataclass
class Mixed(zoo.Tiny):
    """The model as the tests use it."""

    def __post_init__(self):
        self.oracle = MixedOracle(self.hf)

    def _noise(self, prompt, max_tokens):
        return 0.0


def build(folder: Path) -> Mixed:
    """The model, saved; to be called while `spec` and `tensors` are in place."""
    config = {
        **zoo.LLAMA,
        "model_type": "llama",
        "num_hidden_layers": len(WINDOWS),
        "rms_norm_eps": EPS,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    state = {}
    for layer in tensors(spec(llama.Config(config))):
        for name, shape in layer.shapes.items():
            mean, deviation = (1, 0.3) if "norm" in name else (0, 0.8 if "embed" in name else 0.5)
            state[name] = torch.randn(shape, generator=generator) * deviation + mean
    save_file(state, folder / "model.safetensors")
    layers = [SimpleNamespace(mlp=SimpleNamespace(act_fn=torch.nn.functional.silu))]
    hf = SimpleNamespace(
        config=SimpleNamespace(**config, to_json_string=lambda: json.dumps([config, WINDOWS, THETAS, CAPS, SCALES])),
        state_dict=lambda: state,
        model=SimpleNamespace(layers=layers),
        base_model=SimpleNamespace(rotary_emb=_Rotary(None)),
    )
    return Mixed("mixed", hf, folder)


class _Rotary:
    """So that the oracle turns to positions at all."""

    def __init__(self, config):
        pass
