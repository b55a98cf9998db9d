"""Writes GGUF files."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import torch
import zoo
from format_tools import random_blocks, set_half
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

from h2o_flexgen.formats import GGUF


def apart(state: dict) -> dict:
    """A state dict of transformers with each matrix and bias of a gpt-oss's experts by itself, rows being outputs, and
    each matrix of a Gemma 4's: views, which may not be contiguous."""
    found = {}
    for name, tensor in state.items():
        before, fused, bias = (re.split(r"(?<=experts)\.(gate_up|down)_proj(_bias)?$", name) + ["", ""])[:3]
        if not fused:
            found[name] = tensor
            continue
        if ".mlp." not in before:
            found |= {f"{before}.{n}.{fused}_proj.weight": expert for n, expert in enumerate(tensor)}
            continue
        rows = tensor if bias else tensor.transpose(1, 2)
        modules = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if fused == "gate_up" else {"down": rows}
        end = "bias" if bias else "weight"
        for module, experts in modules.items():
            found |= {f"{before}.{n}.{module}_proj.{end}": expert for n, expert in enumerate(experts)}
    return found


def stacked(state: dict) -> dict:
    """A state dict with the matrices of a layer's experts as one tensor."""
    found = {}
    experts = {}
    for name, tensor in state.items():
        template, number, end = (re.split(r"experts\.(\d+)\.", name) + ["", ""])[:3]
        if number:
            experts.setdefault(f"{template}experts.{end}", {})[int(number)] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([of[n] for n in range(len(of))]) for name, of in experts.items()}


def write_gguf(
    path: Path, tiny: zoo.Tiny, kind: Type = Type.F32, arch: str = "llama", endianess=None, others=None, **metadata
) -> Path:
    """A checkpoint as llama.cpp's converter writes it: matrices in `kind`, vectors in fp32. `others`: {end of a
    module's name: type} of matrices in other types."""
    config = tiny.hf.config
    writer = gguf.GGUFWriter(path, arch, endianess=endianess or gguf.GGUFEndian.LITTLE)
    # transformers 4 has no `rope_parameters`
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": config.rope_theta}
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(2)
    if arch != "gemma4":
        writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    if arch == "gemma4":
        head_dim = config.per_layer_config[config.num_hidden_layers - 1].head_dim
        add_gemma4(writer, config)
    writer.add_key_length(head_dim)
    partial = 1.0 if rope["rope_type"] == "proportional" else rope.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(head_dim * partial))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if arch in ("gemma2", "gemma3", "gemma4", "phi3", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window or 0)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch in ("gemma3", "gemma4"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    experts = getattr(config, "num_local_experts", getattr(config, "num_experts", None))
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(getattr(config, "num_experts_per_tok", None) or config.top_k_experts)
        if hasattr(config, "moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if hasattr(config, "shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    for key, value in metadata.items():
        writer.kv_data[0].pop(key.replace("__", "."), None)
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(
        next(a for a, text in gguf.MODEL_ARCH_NAMES.items() if text == arch), config.num_hidden_layers
    )
    for name, tensor in stacked(apart(load_file(tiny.folder / "model.safetensors"))).items():
        name = f"{name}.weight" if name.endswith(".sinks") else name
        name = name.replace("router.scale", "router.proj.scale")
        name = name.replace("router.per_expert_scale", "experts.down_proj.scale")
        name = f"{name}.weight" if name.endswith("layer_scalar") else name
        module, _, part = name.rpartition(".")
        data = as_llama_cpps(module, tensor, config, arch).float().numpy().squeeze()
        data = data if data.ndim else data[None]
        stored = Type.F32
        if data.ndim > 1 and part == "weight":
            stored = next((other for ending, other in (others or {}).items() if module.endswith(ending)), kind)
        writer.add_tensor(f"{names.get_name(module)}.{part}", quantised(data, stored), raw_dtype=stored)
    if rope["rope_type"] == "llama3":  # its frequencies are a tensor
        plain = rope["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / tiny.hf.base_model.rotary_emb.inv_freq).numpy())
    if rope["rope_type"] == "proportional":
        rotated = int(rope["partial_rotary_factor"] * head_dim / 2)
        divisors = [1.0] * rotated + [1e30] * (head_dim // 2 - rotated)
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(tiny.hf.base_model.rotary_emb.attention_scaling)
        for which in ("short", "long"):
            writer.add_tensor(f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_gemma4(writer: gguf.GGUFWriter, config) -> None:
    """What layers have of their own, and whether there are more."""
    layers = list(config.per_layer_config)
    sliding = config.layer_types.index("sliding_attention")
    writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])
    writer.add_key_length_swa(layers[sliding].head_dim)
    writer.add_value_length_swa(layers[sliding].head_dim)
    writer.add_rope_dimension_count_swa(layers[sliding].head_dim)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def quantised(data: np.ndarray, kind: Type) -> np.ndarray:
    """A matrix in `kind`; in types that the package cannot quantise to the numbers are random, of the same size."""
    try:
        return gguf.quantize(data, kind)
    except NotImplementedError:
        form = GGUF[kind.name]
        raw = random_blocks(form, data.shape)
        decoded = gguf.dequantize(raw.flatten(1).numpy(), kind)
        for at in {form.layout.scale_at, form.layout.minimum_at} - {None}:
            set_half(
                raw, at, raw[..., at : at + 2].contiguous().view(torch.float16)[..., 0] * data.std() / decoded.std()
            )
        return raw.flatten(1).numpy()


def as_llama_cpps(module: str, tensor, config, arch: str):
    if arch == "llama" and module.endswith(("q_proj", "k_proj")):
        heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
        halves = tensor.view(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    return tensor + 1 if arch in ("gemma2", "gemma3") and module.endswith("norm") else tensor


def one_tensor(path: Path, data: np.ndarray, kind: Type) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
