"""DeepSpeed ZeRO-Inference: ZeRO stage 3 with its parameters offloaded to RAM if they fit, and to NVMe otherwise.

The model is made under `zero.Init`, and parameters are filled one after the other from the shards: plain
`from_pretrained` peaks at twice the checkpoint. transformers' own initialisation is off: it would ask for a 4th buffer.
Options: "threads" and "buffers" of its NVMe swapper; "offload" ("cpu" or "nvme"); "attention"; "dtype".
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path

from bench.job import Job
from bench.systems.transformers import generate

PACKAGE = "deepspeed"


def run(job: Job) -> dict:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(one_rank | ({"DS_ACCELERATOR": "cpu"} if job.device == "cpu" else {}))
    import torch

    threads = torch.get_num_threads()
    import deepspeed
    import torch._dynamo  # noqa: F401  (its lazy import would fail where `zero.Init` has replaced torch.Tensor.new)
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    deepspeed.init_distributed("gloo" if job.device == "cpu" else "nccl")
    torch.set_num_threads(threads)  # it sets them anew
    config = AutoConfig.from_pretrained(job.model)
    settings = zero_settings(job, config)
    keep = HfDeepSpeedConfig(settings)  # transformers looks at it as long as it lives
    with no_initialisation():  # transformers makes the model under `zero.Init` by these settings
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype_of(job)), attn_implementation=job.options.get("attention", "sdpa")
        )
    fill(model, Path(job.model))
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    engine.eval()
    result = generate(engine.module, job, torch.no_grad)
    del keep
    on_nvme = settings["zero_optimization"]["offload_param"]["device"] == "nvme"
    return result | {"lowest_tier": "disk" if on_nvme else "RAM"}


def dtype_of(job: Job) -> str:
    return job.options.get("dtype", job.dtype)


def zero_settings(job: Job, config) -> dict:
    hidden, largest = config.hidden_size, config.vocab_size * config.word_embed_proj_dim
    device = job.options.get("offload", "cpu" if job.fits_in_ram else "nvme")
    offload = {"device": device, "pin_memory": job.device != "cpu"}
    if device == "nvme":
        offload["nvme_path"] = str(Path(job.scratch) / "zero")
        offload |= {"buffer_count": job.options.get("buffers", 3), "buffer_size": largest}
    return {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype_of(job) == "bfloat16"},
        "fp16": {"enabled": dtype_of(job) == "float16"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "stage3_param_persistence_threshold": hidden,
            "stage3_prefetch_bucket_size": 2 * hidden * hidden,
            "stage3_max_live_parameters": 2 * largest,
        },
        # DeepSpeed drops a setting that it does not know without a word
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": job.options.get("threads", 1),
            "single_submit": False,
            "overlap_events": True,
        },
        "steps_per_print": 1 << 30,
    }


@contextlib.contextmanager
def no_initialisation():
    """transformers draws random weights for a model that is made from its configuration; ours come from the shards."""
    from transformers.integrations import deepspeed

    before = getattr(deepspeed, "initialize_weights_zero3", None)
    deepspeed.initialize_weights_zero3 = lambda model: None
    try:
        yield
    finally:
        deepspeed.initialize_weights_zero3 = before


def fill(model, folder: Path) -> None:
    """Every parameter from the shards, one at a time."""
    import deepspeed
    from safetensors import safe_open

    from h2o_flexgen.machine.memory import trim_heap

    where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name, parameter in model.named_parameters():
        with (
            safe_open(folder / where[name], "pt") as shard,
            deepspeed.zero.GatheredParameters([parameter], modifier_rank=0),
        ):
            parameter.data.copy_(shard.get_tensor(name))
        trim_heap()  # or glibc keeps as much again as the model will take
