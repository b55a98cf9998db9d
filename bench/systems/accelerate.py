"""Hugging Face Accelerate: a device map over GPU, RAM and disk; weights on disk are read from the checkpoint in place.

Options: "share", the fraction of the cap (with CUDA, of the GPU's) for weights; "attention"; "dtype".
"""

from __future__ import annotations

from pathlib import Path

from bench.job import Job
from bench.systems.transformers import generate, load

PACKAGE = "accelerate"


def run(job: Job) -> dict:
    """Runs under `no_grad`, since under `inference_mode` Accelerate keeps the weights of layers that have run."""
    import torch

    from h2o_flexgen.machine.memory import ram_in_all

    share = job.options.get("share", 0)
    if job.device != "cpu":
        max_memory = {0: int(share * job.gpu_bytes), "cpu": ram_in_all() * 3 // 4}
        placement = {"device_map": "auto", "max_memory": max_memory}
    elif share:
        placement = {"device_map": "auto", "max_memory": {"cpu": int(share * job.room)}}
    else:
        placement = {"device_map": {"": "disk"}}
    model = load(job, **placement, offload_folder=str(Path(job.scratch) / "accelerate"))
    devices = set(map(str, getattr(model, "hf_device_map", {}).values()))
    tier = "disk" if "disk" in devices else "RAM" if "cpu" in devices or job.device == "cpu" else "GPU"
    return generate(model, job, torch.no_grad) | {"lowest_tier": tier}
