"""A random checkpoint that every system reads."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from pathlib import Path

import torch

from h2o_flexgen.models.registry import family, named_config, spec_of
from h2o_flexgen.offload.checkpoint import DummyCheckpoint

#: bytes of a shard
SHARD = 1 << 30


def write_checkpoint(model: str, folder: Path, dtype: str) -> Path:
    """Random weights of a named size, as transformers would save them: shards of safetensors with an index."""
    from safetensors.torch import save_file

    config, dtype = named_config(model), getattr(torch, dtype)
    layers = family(config["model_type"]).tensors(spec_of(config))
    shapes = {name: shape for layer in layers for name, shape in layer.shapes.items()}
    needed = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize / 2**30
    free = shutil.disk_usage(folder.parent).free / 2**30
    if free < needed:
        sys.exit(f"error: the checkpoint of {model} takes {needed:.1f} GiB, {folder.parent} has {free:.1f} GiB")
    print(f"writing a random checkpoint of {model}", flush=True)
    source = DummyCheckpoint(layers, dtype)
    folder.mkdir()
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config))
    shard, where = {}, {}

    def flush() -> None:
        file = f"model-{len(set(where.values())) + 1:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=dtype)
        source.read(name, tensor, None)
        shard[name] = tensor
        if sum(t.nbytes for t in shard.values()) > SHARD:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    os.sync()
    return folder


def drop_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
