"""A random checkpoint that every system reads."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from h2o_flexgen.models import opt
from h2o_flexgen.models.config import OPTConfig
from h2o_flexgen.offload.checkpoint import DummyCheckpoint

#: bytes of a shard
SHARD = 1 << 30


def write_checkpoint(model: str, folder: Path, dtype: str) -> Path:
    """Random weights of a named size, as transformers would save them: shards of safetensors with an index."""
    from safetensors.torch import save_file
    from transformers import OPTConfig as Theirs

    config, dtype = OPTConfig.named(model), getattr(torch, dtype)
    shapes = {
        name: shape
        for layer in opt.layers(config)
        for name, shape in (*layer.gathered.values(), *layer.streamed.values())
    }
    needed = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize / 2**30
    free = shutil.disk_usage(folder.parent).free / 2**30
    if free < needed:
        sys.exit(f"error: the checkpoint of {model} takes {needed:.1f} GiB, {folder.parent} has {free:.1f} GiB")
    print(f"writing a random checkpoint of {model}", flush=True)
    source = DummyCheckpoint(shapes, dtype)
    folder.mkdir()
    Theirs(**asdict(config), torch_dtype=str(dtype).removeprefix("torch.")).save_pretrained(folder)
    shard, where = {}, {}

    def flush() -> None:
        file = f"model-{len(set(where.values())) + 1:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=dtype)
        source.read(name, tensor, None)
        shard[f"model.{name}"] = tensor
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
