"""Random checkpoints that every system can read: safetensors shards and GGUF files."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from bench.rows import DEMO, SKEWED
from h2o_flexgen.formats import GGUF
from h2o_flexgen.formats.layout import EXPONENT
from h2o_flexgen.models.registry import family, named_config, spec_of
from h2o_flexgen.models.source import find_model
from h2o_flexgen.storage.dummy import DummyCheckpoint

#: size of a shard in bytes
SHARD = 1 << 30
#: number of random bytes that the tensors of a GGUF file repeat: a prime, so that no two rows are alike
POOL = (1 << 24) - 3
#: standard deviation of random weights
STD = 0.02
#: standard deviation of the logarithm of its rows' lengths in a skewed router
SKEW = 0.5
#: the exponent that stands for a scale of 1
UNIT = 128


def checkpoint(model: str, kind: str, dtype: str, folder: Path) -> Path:
    """Path of a checkpoint, written to `folder` unless it exists; the demo model's is the installed file. `kind` is
    "safetensors", a GGUF type or Q4_K_M, maybe followed by "skewed"."""
    if model == DEMO:
        return find_model(None)[0]
    stem = f"{model.rpartition('/')[2]}-{dtype if kind == 'safetensors' else kind.replace(' ', '-')}"
    path = folder / (stem if kind == "safetensors" else f"{stem}.gguf")
    if path.exists():
        return path
    partial = path.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.unlink(missing_ok=True)
    print(f"writing {path.name}, random weights", flush=True)
    try:
        if kind == "safetensors":
            write_checkpoint(named_config(model), partial, dtype)
        else:
            write_gguf(named_config(model), partial, kind)
    except (OSError, SafetensorError) as e:
        sys.exit(f"error: cannot write {path} ({e}): make room, or name another folder in H2O_FLEXGEN_HOME")
    os.sync()
    return partial.rename(path)


def write_checkpoint(config: dict, folder: Path, dtype: str) -> Path:
    """Write random weights as transformers would save them: safetensors shards with an index."""
    from safetensors.torch import save_file

    dtype = getattr(torch, dtype)
    layers = family(config["model_type"]).tensors(spec_of(config))
    source = DummyCheckpoint(layers, dtype)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": str(dtype).removeprefix("torch.")}))
    shard = {}
    weight_map = {}

    def flush() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, shape in source.shapes.items():
        shard[name] = torch.empty(shape, dtype=dtype)
        source.read(name, shard[name], None)
        if sum(t.nbytes for t in shard.values()) > SHARD:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_gguf(config: dict, path: Path, kind: str) -> None:
    """Write a LLaMA, or a mixture of experts, with random matrices of type `kind`, and in fp32 random routers, biases
    and sinks and norms of ones, without a tokenizer. "skewed" after the type: see SKEW."""
    import gguf

    kind, _, router = kind.partition(" ")
    spec = spec_of(config)
    arch = {"qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}.get(spec.model_type, "llama")
    writer = gguf.GGUFWriter(path, arch)
    sizes = {"vocab_size": spec.vocab, "block_count": spec.layers, "context_length": spec.positions}
    sizes |= {"embedding_length": spec.hidden, "feed_forward_length": spec.inner}
    sizes |= {"head_count": spec.heads, "head_count_kv": spec.kv_heads, "rope_freq_base": config["rope_theta"]}
    sizes |= dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), spec.head_dim)
    if spec.experts:
        sizes |= {"expert_count": spec.experts, "expert_used_count": spec.active}
        sizes |= {"expert_feed_forward_length": spec.expert_inner}
    if spec.model_type == "gpt_oss":
        rope = config["rope_scaling"]
        sizes |= {"sliding_window": config.get("sliding_window", 128), "rope_scaling_factor": rope["factor"]}
        sizes |= {"rope_scaling_orig_ctx_len": rope["original_max_position_embeddings"]}
        sizes |= {"rope_scaling_type": gguf.RopeScalingType.YARN}
    for name, value in ({"tokenizer_model": "none", "layer_norm_rms_eps": spec.eps} | sizes).items():
        getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), spec.layers)
    pool = np.frombuffer(np.random.default_rng(0).bytes(POOL), np.uint8)
    stored = {}  # {name: (shape in bytes or floats, GGUF type)}
    for layer in family(spec.model_type).tensors(spec):
        stacks = {name.replace(".{}", ""): (layer.experts, *shape) for name, shape in layer.expert.values()}
        for name, shape in (layer.units[0].shapes | stacks).items():
            name = f"{name}.weight" if name.endswith(".sinks") else name
            module, _, part = name.rpartition(".")
            gguf_name = f"{names.get_name(module)}.{part}"
            if gguf_name in stored:  # the head is tied to the embedding
                continue
            raw = None
            own = "F32"
            dtype = np.dtype(np.float32)
            if len(shape) > 1 and part == "weight" and "ffn_gate_inp" not in gguf_name:
                own = type_of(gguf_name, kind, spec)
                raw = gguf.GGMLQuantizationType[own]
                dtype = np.dtype(np.uint8)
                shape = (*shape[:-1], *GGUF[own].row_bytes(shape[-1]))
            stored[gguf_name] = shape, own
            writer.add_tensor_info(gguf_name, shape, dtype, int(np.prod(shape)) * dtype.itemsize, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for n, (name, (shape, own)) in enumerate(stored.items()):
        if "norm" in name:
            data = np.ones(shape, np.float32)
        elif own == "F32":
            draw = np.random.default_rng(n)
            data = draw.normal(0, STD, shape).astype(np.float32)
            if router == SKEWED and "ffn_gate_inp" in name:
                data *= np.exp(draw.normal(0, SKEW, (len(data), 1)))
        else:
            data = np.resize(pool, shape)
            set_scales(data.reshape(-1, GGUF[own].layout.nbytes), own)
        writer.write_tensor_data(data)
    writer.close()


def type_of(name: str, kind: str, spec) -> str:
    """The GGUF type of a matrix in a file of this kind. Q4_K_M: llama.cpp's mixture; MXFP4: only experts are."""
    if kind == "MXFP4":
        return kind if "_exps" in name else "Q8_0"
    if kind != "Q4_K_M":
        return kind
    if name == ("token_embd.weight" if spec.tied else "output.weight"):
        return "Q6_K"
    if not name.endswith(("attn_v.weight", "ffn_down.weight")):
        return "Q4_K"
    layer = int(name.split(".")[1])
    eighth = spec.layers // 8
    gets_more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
    return "Q6_K" if gets_more else "Q4_K"


def set_scales(blocks: np.ndarray, kind: str) -> None:
    """Set the scales of random blocks (N, bytes): weights get a mean of 0, without which a deep model overflows,
    and a standard deviation of STD."""
    import gguf

    layout = GGUF[kind].layout
    sample = blocks[:512].copy()
    if layout.scale_kind == EXPONENT:  # of codes that average to 0
        sample[:, layout.scale_at] = UNIT
        std = float(gguf.dequantize(sample, gguf.GGMLQuantizationType[kind]).std())
        blocks[:, layout.scale_at] = UNIT + round(math.log2(STD / std))
        return
    places = [layout.scale_at] + ([] if layout.minimum_at is None else [layout.minimum_at])

    def moments(values: list[float]) -> tuple[float, float]:
        for at, value in zip(places, values):
            sample[:, at : at + 2] = np.array([value], np.float16).view(np.uint8)
        found = gguf.dequantize(sample, gguf.GGMLQuantizationType[kind])
        return float(found.mean()), float(found.std())

    scales = [1.0]
    if len(places) > 1:  # the minima make up for the mean of the codes
        scales.append(-moments([1.0, 0.0])[0] / moments([0.0, 1.0])[0])
    factor = STD / moments(scales)[1]
    for at, value in zip(places, scales):
        for begin, sign in ((0, 1), (1, -1)):  # codes that are not symmetric average to 0, too
            blocks[begin::2, at : at + 2] = np.array([sign * factor * value], np.float16).view(np.uint8)


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.iterdir()) if checkpoint.is_dir() else [checkpoint]


def drop_page_cache(checkpoint: Path) -> None:
    for path in files_of(checkpoint):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
