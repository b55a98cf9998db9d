"""Tiny checkpoints in the quantised formats of Hugging Face, each written and decoded as its method says, in plain
arithmetic: without a look at the engine.

A method's writer takes a matrix (O, I) and gives its tensors, by suffix, and what they stand for in fp32.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import zoo
from safetensors.torch import load_file, save_file
from torch import Tensor

from h2o_flexgen.formats.forms import names_of
from h2o_flexgen.models.registry import family, read_spec
from h2o_flexgen.models.spec import shapes_of

#: sizes that words of eight codes divide
WIDE = dict(hidden_size=64, num_attention_heads=4, intermediate_size=96, moe_intermediate_size=32)
GROUP = 32
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635)
NF4 += (-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725)
NF4 += (0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
FP4 = (0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0, -0.0, -0.0625, -8.0, -12.0, -4.0, -6.0, -2.0, -3.0)
FOUR_BITS = {"nf4": torch.tensor(NF4), "fp4": torch.tensor(FP4) / 12}


class Case(NamedTuple):
    config: dict  # its quantization_config
    write: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
    variant: str = "llama"
    floats: torch.dtype | None = None  # the type of matrices that cannot be streamed as codes
    with_head: bool = False  # the head is quantised too
    only: str = ""  # a pattern of the matrices that are quantised


# codes of 4 bits with zeros


def words(codes: Tensor, order=range(8)) -> Tensor:
    """Codes (n, m) packed along their first dimension: eight a word, (n / 8, m) int32."""
    found = torch.zeros(len(codes) // 8, codes.shape[1], dtype=torch.int64)
    for place, which in enumerate(order):
        found |= codes[which::8].long() << 4 * place
    return torch.where(found >= 1 << 31, found - (1 << 32), found).int()


def quantised(w: Tensor, groups: Tensor, least_zero: int, dtype=torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    """(codes (O, I), scales (O, G), zeros (O, G)) of a matrix whose inputs are in these groups (I,)."""
    scales, zeros = [], []
    for g in range(int(groups.max()) + 1):
        part = w[:, groups == g]
        scale = ((part.amax(1) - part.amin(1)) / 15).to(dtype)
        scales.append(scale)
        zeros.append((-part.amin(1) / scale.float()).round().clamp(least_zero, 15))
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    codes = (w / scale.float()[:, groups] + zero[:, groups]).round().clamp(0, 15)
    return codes, scale, zero


def meant(codes: Tensor, scale: Tensor, zero: Tensor, groups: Tensor) -> Tensor:
    return (codes - zero[:, groups]) * scale.float()[:, groups]


def in_order(w: Tensor, group: int = GROUP) -> Tensor:
    return torch.arange(w.shape[1]) // (w.shape[1] if group < 0 else group)


def gptq(version: int = 1, group: int = GROUP, act_order: bool = False, dtype=torch.float16):
    def write(w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = in_order(w, group)
        if act_order:
            groups = shuffled(groups)
        codes, scale, zero = quantised(w, groups, 1, dtype)
        stored = zero - 1 if version == 1 else zero
        tensors = {"qweight": words(codes.t()), "qzeros": words(stored).t(), "scales": scale.t()}
        found = meant(codes, scale, zero, groups)
        if act_order:
            found = ((codes - zero[:, groups]).to(dtype) * scale[:, groups]).float()
        return tensors | {"g_idx": groups.int()}, found

    return write


def awq(w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scale, zero = quantised(w, in_order(w), 0)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words(codes, order).t(), "qzeros": words(zero, order).t(), "scales": scale.t()}
    return tensors, meant(codes, scale, zero, in_order(w))


def shuffled(groups: Tensor) -> Tensor:
    return groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))]


def pack_quantized(symmetric: bool, act_order: bool = False, dtype=torch.bfloat16):
    def write(w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = shuffled(in_order(w)) if act_order else in_order(w)
        codes, scale, zero = quantised(w, groups, 0, dtype)
        if symmetric:
            scale = (torch.stack([part.abs().amax(1) for part in w.split(GROUP, 1)], 1) / 7.5).to(dtype)
            zero = torch.full(scale.shape, 8.0)
            codes = (w / scale.float()[:, groups] + 8).round().clamp(0, 15)
        tensors = {"weight_packed": words(codes.t()).t(), "weight_scale": scale, "weight_shape": torch.tensor(w.shape)}
        tensors |= {} if symmetric else {"weight_zero_point": words(zero)}
        if act_order:
            found = ((codes - zero[:, groups]).to(dtype) * scale[:, groups]).float()
            return tensors | {"weight_g_idx": groups.int()}, found
        return tensors, meant(codes, scale, zero, groups)

    return write


# FP8


def fp8(kind: str, name: str = "weight_scale_inv", dtype=torch.float32, block=(16, 64)):
    def write(w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = {"tensor": tuple(w.shape), "row": (1, w.shape[1]), "block": block}[kind]
        scale = torch.empty(-(-w.shape[0] // rows), -(-w.shape[1] // columns), dtype=dtype)
        for r in range(scale.shape[0]):
            for c in range(scale.shape[1]):
                scale[r, c] = w[r * rows : (r + 1) * rows, c * columns : (c + 1) * columns].abs().max() / 448
        spread = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: w.shape[0], : w.shape[1]]
        weight = (w / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": weight, name: scale[0, 0] if kind == "tensor" else scale}, weight.float() * spread

    return write


# bitsandbytes


def four_bits(kind: str, nested: bool = False, group: int = 64):
    def write(w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        table = FOUR_BITS[kind]
        flat = w.reshape(-1)
        flat = torch.cat([flat, torch.zeros(-len(flat) % group)]).view(-1, group)
        absmax = flat.abs().amax(1)
        state = {"quant_type": kind, "blocksize": group, "dtype": "float32", "shape": list(w.shape)}
        tensors = {"weight.absmax": absmax}
        if nested:
            offset = float(absmax.mean())
            values = torch.linspace(-1, 1, 256)
            parts = (absmax - offset).split(256)
            largest = torch.stack([part.abs().max() for part in parts])
            codes = torch.cat([((part / most + 1) * 127.5).round() for part, most in zip(parts, largest)])
            absmax = values[codes.long()] * largest.repeat_interleave(256)[: len(codes)] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            tensors = {"weight.absmax": codes.to(torch.uint8), "weight.nested_absmax": largest}
            tensors["weight.nested_quant_map"] = values
        codes = ((flat / absmax[:, None])[..., None] - table).abs().argmin(-1)
        found = (table[codes] * absmax[:, None]).view(-1)[: w.numel()].view(w.shape)
        codes = codes.view(-1)[: w.numel()].to(torch.uint8)
        tensors |= {"weight": (codes[::2] << 4 | codes[1::2])[:, None], "weight.quant_map": table}
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return tensors | {f"weight.quant_state.bitsandbytes__{kind}": text}, found

    return write


def eight_bits(w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    largest = w.abs().amax(1)
    codes = (w / largest[:, None] * 127).round().to(torch.int8)
    found = codes.float() * (largest / 127)[:, None]
    return {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}, found


# checkpoints

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
V2 = GPTQ | {"checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 64]}
NF4_CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def compressed_tensors(form: str, targets: Sequence[str] = ("Linear",), **weights) -> dict:
    groups = {"group_0": {"targets": [*targets], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


BY_GROUP = dict(num_bits=4, type="int", strategy="group", group_size=GROUP)
PACKED = compressed_tensors("pack-quantized", **BY_GROUP)
UNEVEN = compressed_tensors("pack-quantized", **BY_GROUP, symmetric=False)
ACT_ORDER = compressed_tensors("pack-quantized", **BY_GROUP, actorder="dynamic")
SOME = compressed_tensors("pack-quantized", ("re:.*mlp", "model.layers.0.self_attn.q_proj"), **BY_GROUP)
CHANNELS = compressed_tensors("float-quantized", num_bits=8, type="float", strategy="channel")
CASES = {
    "gptq": Case(GPTQ, gptq()),
    "gptq v2 with biases": Case(V2, gptq(version=2), "llama_biases_llama3"),
    "gptq of one group": Case(GPTQ | {"group_size": -1, "desc_act": True}, gptq(group=-1)),
    "gptq in act-order": Case(GPTQ | {"desc_act": True}, gptq(act_order=True), floats=torch.float16),
    "gptq with its head": Case(GPTQ | {"lm_head": True}, gptq(), with_head=True),
    "gptq in bfloat16": Case(GPTQ, gptq(dtype=torch.bfloat16)),
    "awq": Case(AWQ, awq),
    "awq of some": Case(AWQ | {"modules_to_not_convert": ["up_proj"]}, awq, only="(?<!up_proj).weight"),
    "fp8 blocks": Case(BLOCKS, fp8("block", dtype=torch.bfloat16)),
    "fp8 large blocks": Case(BLOCKS | {"weight_block_size": [128, 128]}, fp8("block", block=(128, 128))),
    "fp8 tensor": Case({"quant_method": "fp8"}, fp8("tensor", "weight_scale")),
    "fbgemm": Case({"quant_method": "fbgemm_fp8"}, fp8("row", "weight_scale")),
    "float-quantized": Case(CHANNELS, fp8("row", "weight_scale", torch.bfloat16)),
    "pack-quantized": Case(PACKED, pack_quantized(True)),
    "pack-quantized with zeros": Case(UNEVEN, pack_quantized(False)),
    "pack-quantized in act-order": Case(ACT_ORDER, pack_quantized(True, True, torch.float16), floats=torch.float16),
    "pack-quantized of some": Case(SOME, pack_quantized(True), only=r"mlp|layers\.0\.self_attn\.q_proj"),
    "nf4": Case(NF4_CONFIG, four_bits("nf4")),
    "nf4 nested": Case(NF4_CONFIG | {"bnb_4bit_use_double_quant": True}, four_bits("nf4", nested=True)),
    "fp4": Case(NF4_CONFIG | {"bnb_4bit_quant_type": "fp4"}, four_bits("fp4")),
    "int8": Case(INT8, eight_bits),
    "gptq of experts": Case(GPTQ, gptq(), "qwen3_moe", only="_proj"),
    "fp8 of experts": Case(BLOCKS, fp8("block", dtype=torch.bfloat16), "qwen3_moe", only="_proj"),
    "int8 of experts": Case(INT8, eight_bits, "qwen3_moe", only="_proj"),
}


class Checkpoint(NamedTuple):
    tiny: zoo.Tiny  # with the values that the matrices stand for
    matrices: dict[str, Tensor]  # these values by name; of a group of experts below each other


def build(case: Case, plain: zoo.Tiny, folder: Path) -> Checkpoint:
    """Write the checkpoint of a case in `folder`: all matrices of `plain` but the embedding, and mostly the head."""
    from transformers import AutoModelForCausalLM

    state = load_file(plain.folder / "model.safetensors")
    matrices = {}
    stored = {}
    for name, tensor in state.items():
        is_kept = name.startswith("model.embed") or (name.startswith("lm_head") and not case.with_head)
        if tensor.dim() < 2 or is_kept or not re.search(case.only, name):
            stored[name] = tensor
            continue
        tensors, matrices[name] = case.write(tensor)
        module = name.removesuffix("weight")
        stored |= {module + suffix: part.contiguous().clone() for suffix, part in tensors.items()}
    dequantised = shutil.copytree(plain.folder, folder.with_name(f"{folder.name} dequantised"))
    save_file(state | matrices, dequantised / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(dequantised, dtype=torch.float32).eval()
    shutil.copytree(plain.folder, folder)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=case.config)
    spec = read_spec(folder)
    for name in shapes_of(family(spec.model_type).tensors(spec)):
        if experts := [matrices.pop(each) for each in names_of(name)]:
            matrices[name] = torch.cat(experts)
    return Checkpoint(zoo.Tiny(folder.name, model, folder), matrices)


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
