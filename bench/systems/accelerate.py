"""Hugging Face Accelerate: a device map over GPU, RAM and disk; what lies on disk is read from the checkpoint in place.

Options: "share", the share of the cap (of the GPU, with CUDA) that may hold weights; "attention", "dtype".
"""

from __future__ import annotations

from pathlib import Path

from bench.job import Job
from bench.systems.transformers import generate, load

PACKAGE = "accelerate"


def run(job: Job) -> dict:
    """Under `no_grad`: `inference_mode` makes it hold the weights of every layer that has run."""
    import torch

    from h2o_flexgen.machine.memory import ram_in_all

    share = job.options.get("share", 0)
    if job.device != "cpu":
        most = {0: int(share * job.gpu_bytes), "cpu": ram_in_all() * 3 // 4}
        where = {"device_map": "auto", "max_memory": most}
    elif share:
        where = {"device_map": "auto", "max_memory": {"cpu": int(share * job.room)}}
    else:
        where = {"device_map": {"": "disk"}}
    model = load(job, **where, offload_folder=str(Path(job.scratch) / "accelerate"))
    homes = set(map(str, getattr(model, "hf_device_map", {}).values()))
    tier = "disk" if "disk" in homes else "RAM" if "cpu" in homes or job.device == "cpu" else "GPU"
    return generate(model, job, torch.no_grad) | {"lowest_tier": tier}
