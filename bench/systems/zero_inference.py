"""DeepSpeed ZeRO-Inference: ZeRO stage 3 with parameters offloaded to RAM if they fit, and to NVMe otherwise.

The model is created under `zero.Init` and its parameters are filled one by one from the shards, since plain
`from_pretrained` peaks at twice the checkpoint. transformers' initialisation is off, since it needs a fourth buffer.
Options: "threads" and "buffers" of its NVMe swapper; "offload" ("cpu" or "nvme"); "attention"; "dtype".
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from bench.common import free_port
from bench.job import Job
from bench.systems.transformers import generate

PACKAGE = "deepspeed"


def run(job: Job) -> dict:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if job.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import torch

    threads = torch.get_num_threads()
    import deepspeed
    import torch._dynamo  # noqa: F401  (its lazy import would fail where `zero.Init` has replaced torch.Tensor.new)
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    deepspeed.init_distributed("gloo" if job.device == "cpu" else "nccl")
    torch.set_num_threads(threads)  # init_distributed changes it
    config = AutoConfig.from_pretrained(job.model)
    settings = zero_settings(job, config)
    keep = HfDeepSpeedConfig(settings)  # transformers reads it for as long as it exists
    with no_initialisation():  # these settings make transformers use `zero.Init`
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
    hidden = config.hidden_size
    largest = config.vocab_size * config.word_embed_proj_dim
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
        # DeepSpeed silently ignores settings that it does not know
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
    """Keep transformers from drawing random weights for a model created from its configuration."""
    from transformers.integrations import deepspeed

    before = getattr(deepspeed, "initialize_weights_zero3", None)
    deepspeed.initialize_weights_zero3 = lambda model: None
    try:
        yield
    finally:
        deepspeed.initialize_weights_zero3 = before


def fill(model, folder: Path) -> None:
    """Read all parameters from the shards, one at a time."""
    import deepspeed
    from safetensors import safe_open

    from h2o_flexgen.machine.memory import trim_heap

    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name, parameter in model.named_parameters():
        with (
            safe_open(folder / weight_map[name], "pt") as shard,
            deepspeed.zero.GatheredParameters([parameter], modifier_rank=0),
        ):
            parameter.data.copy_(shard.get_tensor(name))
        trim_heap()  # otherwise glibc keeps as much memory again as the model takes
