"""One system on one job, in a process of its own: load, warm up, generate to the last token, tell what it took.

Run by scripts/bench_throughput.py, inside a memory cgroup where the job has a cap:

    python scripts/bench_systems.py JOB.json RESULT.json
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import bench_common as common


@dataclass
class Job:
    """What one process does.

    Attributes:
        system: a key of SYSTEMS.
        model: folder of the checkpoint; scratch: folder for what is offloaded.
        batch: sequences generated together (for ours: prompts of the job).
        gpu_bytes, ram_bytes: what a system may plan with; None: whatever there is.
        options: of the system alone; kv_budget: heavy and recent slots (ours only).
    """

    system: str
    model: str
    scratch: str
    dtype: str
    device: str
    prompt_len: int
    gen_len: int
    batch: int
    gpu_bytes: int | None = None
    ram_bytes: int | None = None
    options: dict = field(default_factory=dict)
    kv_budget: list[int] | None = None


# transformers, and what is built on it


def generate(model, job: Job, context) -> dict:
    """Seconds of prefill and decode of a job, after two tokens of one sequence to warm up (files, traces, kernels)."""
    prompts = common.random_prompts(job.batch, job.prompt_len)
    # of a slice of the hidden states, torch would copy the vocabulary's matrix once for every sequence
    model.get_output_embeddings().register_forward_pre_hook(lambda module, inputs: (inputs[0].contiguous(),))
    with context():
        common.time_generate(model, prompts[:1], 2, job.device)
        return common.time_generate(model, prompts, job.gen_len, job.device)


def load(job: Job, **kwargs):
    import torch
    from transformers import AutoModelForCausalLM

    attention = job.options.get("attention", "sdpa")
    dtype = getattr(torch, job.dtype)
    return AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype, attn_implementation=attention, **kwargs).eval()


def run_transformers(job: Job) -> dict:
    """All weights on the device. On a CPU they are a mapped file, which the kernel pages under a cap."""
    import torch

    model = load(job).to(job.device)
    tier = "GPU" if job.device != "cpu" else "RAM" if fits_in_ram(job) else "disk"
    return generate(model, job, torch.inference_mode) | {"lowest_tier": tier}


def fits_in_ram(job: Job) -> bool:
    return job.ram_bytes is None or sum(path.stat().st_size for path in Path(job.model).iterdir()) < job.ram_bytes


def run_accelerate(job: Job) -> dict:
    """A device map over GPU, RAM and disk; what lies on disk is read from the checkpoint in place.

    Under `no_grad`: `inference_mode` makes it hold the weights of every layer that has run."""
    import torch

    ram = job.ram_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if job.device != "cpu":
        where = {
            "device_map": "auto",
            "max_memory": {0: job.gpu_bytes // 2, "cpu": ram * 3 // 4},
        }
    elif share := job.options.get("share"):
        where = {"device_map": "auto", "max_memory": {"cpu": int(share * ram)}}
    else:
        where = {"device_map": {"": "disk"}}
    model = load(job, **where, offload_folder=str(Path(job.scratch) / "accelerate"))
    homes = set(map(str, getattr(model, "hf_device_map", {}).values()))
    tier = "disk" if "disk" in homes else "RAM" if "cpu" in homes else "GPU"
    return generate(model, job, torch.no_grad) | {"lowest_tier": tier}


def run_zero(job: Job) -> dict:
    """ZeRO stage 3 with its parameters offloaded to RAM or to a file system, as ZeRO-Inference.

    The model is made under `zero.Init`, and parameters are filled one after the other from the shards: plain
    `from_pretrained` peaks at twice the checkpoint. Without transformers' own initialisation 3 buffers are enough."""
    one_rank = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    os.environ.update(one_rank)
    if job.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
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
    dtype = getattr(torch, job.dtype)
    with no_initialisation():  # transformers makes the model under `zero.Init` by these settings
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=job.options.get("attention", "sdpa")
        )
    fill(model, job.model)
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    engine.eval()
    result = generate(engine.module, job, torch.no_grad)
    del keep
    device = settings["zero_optimization"]["offload_param"]["device"]
    return result | {
        "lowest_tier": "disk" if device == "nvme" else "RAM",
        "settings": settings,
    }


def zero_settings(job: Job, config) -> dict:
    hidden = config.hidden_size
    largest = config.vocab_size * config.word_embed_proj_dim
    offload = {
        "device": job.options.get("offload", "cpu" if fits_in_ram(job) else "nvme"),
        "pin_memory": job.device != "cpu",
    }
    if offload["device"] == "nvme":
        offload |= {
            "nvme_path": str(Path(job.scratch) / "zero"),
            "buffer_count": 3,
            "buffer_size": largest,
        }
    return {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": job.dtype == "bfloat16"},
        "fp16": {"enabled": job.dtype == "float16"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "stage3_param_persistence_threshold": hidden,
            "stage3_prefetch_bucket_size": 2 * hidden * hidden,
            "stage3_max_live_parameters": 2 * largest,
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "thread_count": 2,
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


def fill(model, folder: str) -> None:
    """Every parameter from the shards, one at a time."""
    import deepspeed
    from safetensors import safe_open

    where = json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"]
    for name, parameter in model.named_parameters():
        with (
            safe_open(Path(folder) / where[name], "pt") as shard,
            deepspeed.zero.GatheredParameters([parameter], modifier_rank=0),
        ):
            parameter.data.copy_(shard.get_tensor(name))
        ctypes.CDLL(None).malloc_trim(0)  # or glibc keeps as much again as the model will take


# ours


def run_ours(job: Job) -> dict:
    """With the policy that the search finds for the job, or in one block of a given shape."""
    from h2o_flexgen import LLM, KVBudget, SamplingParams
    from h2o_flexgen.plan import Workload

    size, batches = job.options.get("block", (None, None))
    with LLM(
        job.model,
        kv_budget=None if job.kv_budget is None else KVBudget.from_size(*job.kv_budget),
        device=job.device,
        dtype=job.dtype,
        offload_dir=job.scratch,
        gpu_mem=job.gpu_bytes,
        gpu_batch_size=size,
        num_gpu_batches=batches,
        hardware=job.options["hardware"],
        progress=False,
    ) as llm:
        prompts = common.random_prompts(job.batch, job.prompt_len)
        llm.generate(prompts[:1], SamplingParams(max_tokens=2, ignore_eos=True))
        # the machine's rates change within a run where it is shared: the floor is that of before and after
        size = llm.choose(Workload((job.prompt_len,) * job.batch, job.gen_len))[1].gpu_batch_size
        rates = [machine_rates(job, llm.config, size)]
        moved = decode_bytes(llm)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=job.gen_len, ignore_eos=True))
        assert all(len(o.outputs[0].token_ids) == job.gen_len for o in outputs)
        report, config = llm.report, llm.config
    matrices = sum(math.prod(shape) for layer in llm.layers for _, shape in layer.streamed.values() if len(shape) > 1)
    flops = 2 * matrices * job.batch * (job.gen_len - 1)
    rates.append(machine_rates(job, config, report["policy"]["gpu_batch_size"]))
    bandwidth, rate = (sum(pair) / 2 for pair in zip(*rates))
    tier = "disk" if report["bytes_moved"]["disk_to_cpu"] else "GPU" if job.device != "cpu" else "RAM"
    return {
        "prefill": report["prefill"]["seconds"],
        "decode": report["decode"]["seconds"],
        "lowest_tier": tier,
        "report": report,
        "decode_bytes": moved,
        "disk_bytes_per_s": bandwidth,
        "flops_per_s": rate,
        "rates_before_and_after": rates,
        "floor": {"disk": moved["disk_to_cpu"] / bandwidth, "compute": flops / rate},
    }


def decode_bytes(llm) -> dict[str, int]:
    """Filled by the next job with the bytes that its decode steps move, by link."""
    from h2o_flexgen.engine.engine import Engine

    moved, before, original = Counter(), Counter(), Engine._lap

    def lap(engine, phase, start):
        now = Counter(llm._moved(engine.caches, engine.activations))
        if phase == "decode":
            moved.update({link: now[link] - before[link] for link in now})
        before.clear()
        before.update(now)
        return original(engine, phase, start)

    Engine._lap = lap
    return moved


def machine_rates(job: Job, config, rows: int) -> tuple[float, float]:
    """Bytes per second from disk, and flops per second of products with so many rows."""
    return disk_rate(job.model), product_rate(config, job.dtype, job.device, rows)


def disk_rate(folder: str) -> float:
    """Bytes per second of reading a checkpoint alone, as the engine reads, past the page cache."""
    from h2o_flexgen.offload.device import Device, as_numpy
    from h2o_flexgen.offload.disk import DiskIO, File, wait

    path = max(Path(folder).glob("*.safetensors"), key=lambda path: path.stat().st_size)
    piece = min(64 << 20, path.stat().st_size >> 12 << 12)
    # two pieces at a time, so that the disk does not pause between them
    buffers, io, file = [as_numpy(Device("cpu").buffer(piece)) for _ in range(2)], DiskIO(), File(path)
    pieces = min(32, path.stat().st_size // piece)
    coming = []
    begin = time.perf_counter()
    for n in range(pieces):
        if len(coming) == 2:
            wait(coming.pop(0))
        coming.append(io.read(file, buffers[n % 2], n * piece, True))
    for reads in coming:
        wait(reads)
    seconds = time.perf_counter() - begin
    io.close()
    file.close()
    return pieces * piece / seconds


def product_rate(config, dtype: str, device: str, rows: int) -> float:
    """Flops per second of the matrix products of a decoder layer for so many rows, with nothing between them."""
    import torch

    from h2o_flexgen.cpu import linear

    hidden, ffn = config.hidden_size, config.ffn_dim
    like = {"dtype": getattr(torch, dtype), "device": device}
    shapes = [(hidden, hidden)] * 4 + [(ffn, hidden), (hidden, ffn)]
    weights = [torch.randn(shape, **like) for shape in shapes]
    inputs = {n: torch.randn(rows, n, **like) for n in {hidden, ffn}}
    times = []
    for _ in range(16):
        begin = time.perf_counter()
        for w in weights:
            linear(inputs[w.shape[1]], w)
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 2 * rows * sum(w.numel() for w in weights) / common.median(times[1:])


SYSTEMS = {
    "transformers": run_transformers,
    "Accelerate": run_accelerate,
    "ZeRO-Inference": run_zero,
    "ours": run_ours,
}


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    if job.device != "cpu" and job.gpu_bytes is not None:
        import torch

        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.gpu_bytes / total))
    begin = time.perf_counter()
    result = SYSTEMS[job.system](job)
    result |= {"process_seconds": time.perf_counter() - begin, "job": asdict(job)}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
