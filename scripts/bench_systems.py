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
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median

import bench_common as common

from h2o_flexgen.offload.memory import ram_in_all, trim_heap

#: at least so long products, and attention, are timed for their rate
RATE_SECONDS = 3.0
#: caches that attention is timed over, in bytes: more than a processor's cache holds
COLD = 1 << 27
#: samples of the disk while a job decodes, and the bytes of each
SAMPLES, SAMPLE = 8, 1 << 30


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
        # on a card a batch of another size has other kernels, and its memory is not asked for yet
        common.time_generate(model, prompts[:1] if job.device == "cpu" else prompts, 2, job.device)
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
    """Whether the checkpoint fits under the cap, or without one into most of the RAM."""
    return checkpoint_bytes(job) < room(job)


def room(job: Job) -> int:
    """Bytes of RAM that a system may plan with."""
    return job.ram_bytes or int(0.8 * ram_in_all())


def checkpoint_bytes(job: Job) -> int:
    return sum(path.stat().st_size for path in Path(job.model).iterdir())


def run_accelerate(job: Job) -> dict:
    """A device map over GPU, RAM and disk; what lies on disk is read from the checkpoint in place. The option "share"
    is that of the cap (of the card, with CUDA) that may hold weights.

    Under `no_grad`: `inference_mode` makes it hold the weights of every layer that has run."""
    import torch

    share = job.options.get("share", 0)
    if job.device != "cpu":
        most = {0: int(share * job.gpu_bytes), "cpu": ram_in_all() * 3 // 4}
        where = {"device_map": "auto", "max_memory": most}
    elif share:
        where = {"device_map": "auto", "max_memory": {"cpu": int(share * room(job))}}
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
        "MASTER_PORT": str(free_port()),
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


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


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
            "buffer_count": job.options.get("buffers", 3),
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
        trim_heap()  # or glibc keeps as much again as the model will take


# FlexGen


def run_flexgen(job: Job) -> dict:
    """The `flexgen` package through its Python API, CUDA only: everything on the card, without overlap, if the weights
    leave room there, and otherwise placed as its paper (arXiv 2303.06865, table of policies) places OPT-30B on a card
    of 16 GB, with attention on the CPU unless the option "cpu_attention" is false."""
    import numpy as np
    from flexgen.compression import CompressionConfig
    from flexgen.flex_opt import OptLM, Policy
    from flexgen.opt_config import OptConfig
    from flexgen.timer import timers
    from flexgen.utils import ExecutionEnv

    theirs = json.loads((Path(job.model) / "config.json").read_text())
    config = OptConfig(
        name="checkpoint",
        max_seq_len=theirs["max_position_embeddings"],
        num_hidden_layers=theirs["num_hidden_layers"],
        hidden_size=theirs["hidden_size"],
        n_head=theirs["num_attention_heads"],
        input_dim=theirs["hidden_size"],
        ffn_embed_dim=theirs["ffn_dim"],
        vocab_size=theirs["vocab_size"],
        dtype=np.float16,
    )
    on_gpu = checkpoint_bytes(job) < 0.85 * (job.gpu_bytes or math.inf)
    percent = (100, 0, 100, 0, 100, 0) if on_gpu else (20, 80, 0, 100, 0, 100)
    size = min(job.batch, 32)  # the paper's 48 does not divide what a doubled batch comes to
    no_compression = CompressionConfig(num_bits=4, group_size=64, group_dim=0, symmetric=False)
    policy = Policy(
        gpu_batch_size=size,
        num_gpu_batches=job.batch // size,
        **dict(zip(FLEXGEN_SHARES, percent)),
        overlap=not on_gpu,
        sep_layer=True,
        pin_weight=True,
        cpu_cache_compute=not on_gpu and job.options.get("cpu_attention", True),
        attn_sparsity=1.0,
        compress_weight=False,
        comp_weight_config=no_compression,
        compress_cache=False,
        comp_cache_config=no_compression,
    )
    weights = flexgen_weights(job.model, job.scratch)
    env = ExecutionEnv.create(str(Path(job.scratch) / "flexgen"))
    try:
        model = OptLM(config, env, str(weights), policy)
        prompts = common.random_prompts(job.batch, job.prompt_len)
        model.generate([p[:32] for p in prompts], max_new_tokens=1)
        timers("generate").reset()
        out = model.generate(prompts, max_new_tokens=job.gen_len)
        assert out.shape == (job.batch, job.prompt_len + job.gen_len)
        prefill, *steps = timers("generate").costs
    finally:
        env.close_copy_threads()
    assert len(steps) == job.gen_len - 1
    tier = "GPU" if on_gpu else "RAM"
    return {
        "prefill": prefill,
        "decode": sum(steps),
        "lowest_tier": tier,
        "policy": [size, job.batch // size, *percent],
    }


#: the names of `--percent`'s numbers in FlexGen's policy
FLEXGEN_SHARES = [f"{what}_{where}_percent" for what in ("w", "cache", "act") for where in ("gpu", "cpu")]


def flexgen_weights(model: str, scratch: str) -> Path:
    """The folder of a checkpoint as FlexGen reads it, made beside it once: one .npy file per parameter, without that
    ending. Until it is whole it lies in `scratch`, which the benchmark removes whatever happens."""
    import numpy as np
    from safetensors import safe_open

    weights = Path(f"{model}-numpy")
    folder = weights / "checkpoint-np"
    if folder.exists():
        return weights
    partial = Path(scratch) / folder.name
    partial.mkdir(parents=True)
    for shard in sorted(Path(model).glob("*.safetensors")):
        with safe_open(shard, "np") as tensors:
            for name in tensors.keys():
                short = name.removeprefix("model.").replace("decoder.final_layer_norm", "decoder.layer_norm")
                with open(partial / short, "wb") as file:
                    np.save(file, tensors.get_tensor(name))
    weights.mkdir(exist_ok=True)
    partial.rename(folder)
    return weights


# ours


def run_ours(job: Job) -> dict:
    """With the policy that the search finds for the job, or in one block of a given shape."""
    from h2o_flexgen import LLM, KVBudget, SamplingParams
    from h2o_flexgen.sizes import Workload

    size, batches = job.options.get("block", (None, None))
    make = partial(
        LLM,
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
    )
    with make() as llm:
        config, layers = llm.config, llm.layers
        rule, policy, placement, _ = llm.choose(Workload((job.prompt_len,) * job.batch, job.gen_len))
        decode = DecodeWork(job, config, rule, policy, placement)
    # the machine's rates change within a run where it is shared: the floor is that of all samples
    rates = [machine_rates(decode)]
    with make() as llm:
        prompts = common.random_prompts(job.batch, job.prompt_len)
        llm.generate(prompts[:1], SamplingParams(max_tokens=2, ignore_eos=True))
        moved = decode_bytes(llm)
        samples = disk_samples(job, lambda: settle(llm)) if decode.reads_disk else []
        outputs = llm.generate(prompts, SamplingParams(max_tokens=job.gen_len, ignore_eos=True))
        assert all(len(o.outputs[0].token_ids) == job.gen_len for o in outputs)
        report = without(llm.report, sum(seconds for _, seconds in samples))
    rates.append(machine_rates(decode))
    during = [rate for rate, _ in samples]
    sampled = {what: [r[what] for r in rates] + during * (what == "disk") for what in rates[0]}
    matrices = sum(math.prod(shape) for layer in layers for _, shape in layer.streamed.values() if len(shape) > 1)
    work = {"products": 2 * matrices * job.batch * (job.gen_len - 1)} | decode.attended_bytes()
    if decode.reads_disk:
        work["disk"] = moved["disk_to_cpu"]
    if job.device != "cpu":
        work["bus"] = max(moved["cpu_to_gpu"], moved["gpu_to_cpu"])  # both ways at a time
    seconds = {what: amount / mean(sampled[what]) for what, amount in work.items()}
    # products and attention both take all cores, or the card
    seconds["compute"] = seconds.pop("products") + seconds.pop("attention", 0.0)
    return {
        "prefill": report["prefill"]["seconds"],
        "decode": report["decode"]["seconds"],
        "lowest_tier": lowest_tier(report["policy"]["percent"], job.device),
        "report": report,
        "decode_bytes": moved,
        "rates_before_and_after": rates,
        "disk_rates_during": during,
        "floor": seconds,
    }


def lowest_tier(percent: Sequence[float], device: str) -> str:
    """The slowest tier on which a policy puts anything."""
    gpu, cpu = percent[0::2], percent[1::2]
    if any(g + c < 100 for g, c in zip(gpu, cpu)):
        return "disk"
    return "RAM" if any(cpu) or device == "cpu" else "GPU"


def decode_bytes(llm) -> dict[str, int]:
    """Filled by the next job with the bytes that its decode steps move, by link."""
    from h2o_flexgen.engine.runner import Engine

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


def settle(llm) -> None:
    """Wait for what the engine has asked the disk for, and for what the card computes."""
    from h2o_flexgen.offload.disk import PREFETCH

    for requests in llm._io.queues.values():
        met = threading.Barrier(llm._io.threads)  # all threads are here when they have nothing else to do
        for future in [requests.submit(PREFETCH, met.wait) for _ in range(llm._io.threads)]:
            future.result()
    llm.device.synchronize()


def disk_samples(job: Job, settle: Callable[[], None]) -> list[tuple[float, float]]:
    """Filled by the next job, which rests for it between decode steps, with (bytes per second of its disk, seconds of
    rest): a disk that is read for an hour may be another than before and after. `settle`, which is no rest, makes the
    job's own requests end first."""
    found = []
    at = {max(2, n * job.gen_len // (SAMPLES + 1)) for n in range(1, SAMPLES + 1)}

    def sample(i: int) -> None:
        if i in at:
            settle()
            begin = time.perf_counter()
            rate = disk_rate(job.model, 16 << 20, SAMPLE)  # smaller pieces would be cut into smaller requests
            found.append((rate, time.perf_counter() - begin))

    common.before_token_steps(sample)
    return found


def without(report: dict, rest: float) -> dict:
    """A report as if a job had not rested so many seconds of its decode steps."""
    report = dict(report)
    for phase in ("decode", "total"):
        seconds = report[phase]["seconds"]
        ratio = seconds / (seconds - rest)
        report[phase] |= {"seconds": seconds - rest, "tokens_per_s": report[phase]["tokens_per_s"] * ratio}
    return report


@dataclass(frozen=True)
class DecodeWork:
    """What the decode steps of a job of ours do, by the policy it runs under."""

    job: Job
    config: object
    rule: object
    policy: object
    placement: object

    @property
    def sizes(self) -> list[int]:
        """The batches of a full block."""
        from h2o_flexgen.sizes import batch_sizes

        return batch_sizes(self.job.batch, self.policy)

    @property
    def rows(self) -> int:
        """That go through a product at once."""
        from h2o_flexgen.sizes import matmul_rows

        return max(matmul_rows(self.sizes))

    @property
    def reads_disk(self) -> bool:
        return lowest_tier(self.policy.percent, self.job.device) == "disk"

    def layout(self, batch: int):
        """The cache of one layer."""
        import torch

        job = self.job
        return self.rule.layout(self.config, getattr(torch, job.dtype), batch, job.prompt_len, job.gen_len)

    def attended_bytes(self) -> dict[str, float]:
        """K and V over which attention goes, in all layers and steps: on the device ("attention"), and beside it on the
        CPU ("attention on the CPU")."""
        job, sizes, attended = self.job, self.sizes, Counter()
        if job.gen_len == 1:
            return attended
        of_batch = [sum(self.layout(n).used_bytes(job.prompt_len + i) for i in range(1, job.gen_len)) for n in sizes]
        for (_, k), home in self.placement.cache.items():
            here = home == "cpu" and self.policy.cpu_cache_compute
            attended["attention on the CPU" if here else "attention"] += of_batch[k]
        blocks = job.batch / sum(sizes)
        return {what: blocks * nbytes for what, nbytes in attended.items()}


def machine_rates(decode: DecodeWork) -> dict[str, float]:
    """Bytes per second from disk (if any come from there) and over the bus (with CUDA), flops per second of products,
    and bytes of K and V per second of attention, wherever it runs."""
    job = decode.job
    rates = {"disk": disk_rate(job.model)} if decode.reads_disk else {}
    rates["products"] = product_rate(decode.config, job.dtype, job.device, decode.rows)
    for what in decode.attended_bytes():
        rates[what] = attention_rate(decode, job.device if what == "attention" else "cpu")
    return rates | ({} if job.device == "cpu" else {"bus": bus_rate()})


def attention_rate(decode: DecodeWork, at: str) -> float:
    """Bytes of K and V per second of a decode step's attention over the caches of whole batches, half-way through the
    job, one after the other with nothing between them."""
    from h2o_flexgen.hardware import attention_call
    from h2o_flexgen.offload.device import Device

    job, layout = decode.job, decode.layout(decode.sizes[0])
    step = min(job.gen_len // 2 + 1, job.gen_len - 1)  # one that only writes to a segment, as most do
    call = partial(attention_call, Device(at), decode.rule, layout, job.prompt_len, step)
    calls = [call() for _ in range(2 + COLD // layout.kv_bytes)]
    return layout.used_bytes(job.prompt_len + step) / calls_seconds(calls, at)


def bus_rate() -> float:
    """Bytes per second from pinned RAM to the card."""
    import torch

    here = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device="cuda")
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        there.copy_(here, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return here.nbytes / median(times[1:])


def disk_rate(folder: str, piece: int = 64 << 20, least: int = 2 << 30) -> float:
    """Bytes per second of reading a checkpoint alone, as the engine reads, past the page cache: at least so many, in
    such pieces, two at a time."""
    from h2o_flexgen.offload.device import Device, as_numpy
    from h2o_flexgen.offload.disk import DiskIO, File, wait

    path = max(Path(folder).glob("*.safetensors"), key=lambda path: path.stat().st_size)
    size = path.stat().st_size
    piece = min(piece, size >> 12 << 12)
    # two pieces at a time, so that the disk does not pause between them
    buffers, io, file = [as_numpy(Device("cpu").buffer(piece)) for _ in range(2)], DiskIO(), File(path)
    pieces = -(-least // piece)  # from the start again, if the file is short
    coming = []
    begin = time.perf_counter()
    for n in range(pieces):
        if len(coming) == 2:
            wait(coming.pop(0))
        at = n % (size // piece) * piece
        coming.append(io.read(file, buffers[n % 2], at, True))
    for reads in coming:
        wait(reads)
    seconds = time.perf_counter() - begin
    io.close()
    file.close()
    return pieces * piece / seconds


def product_rate(config, dtype: str, device: str, rows: int) -> float:
    """Flops per second of the matrix products of a decoder layer for so many rows, with nothing between them."""
    import torch

    from h2o_flexgen.kernels.linear import linear

    hidden, ffn = config.hidden_size, config.ffn_dim
    like = {"dtype": getattr(torch, dtype), "device": device}
    shapes = [(hidden, hidden)] * 4 + [(ffn, hidden), (hidden, ffn)]
    weights = [torch.randn(shape, **like) for shape in shapes]
    inputs = {n: torch.randn(rows, n, **like) for n in {hidden, ffn}}
    layer = [partial(linear, inputs[w.shape[1]], w) for w in weights]
    return 2 * rows * sum(w.numel() for w in weights) / (len(layer) * calls_seconds(layer, device))


def calls_seconds(calls: list[Callable], device: str) -> float:
    """Seconds of a call, by the median time of all of them in turn; on a card, of turns enough that their start and end
    do not count."""
    import torch

    def timed(turns: int) -> float:
        begin = time.perf_counter()
        for _ in range(turns):
            for call in calls:
                call()
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    times, turns = [], 1
    with torch.inference_mode():
        timed(1)
        while device != "cpu" and timed(turns) < 0.01:
            turns *= 2
        while len(times) < 16 or sum(times) < RATE_SECONDS:
            times.append(timed(turns))
    return median(times) / (turns * len(calls))


SYSTEMS = {
    "transformers": run_transformers,
    "Accelerate": run_accelerate,
    "ZeRO-Inference": run_zero,
    "FlexGen": run_flexgen,
    "ours": run_ours,
}


def die_with_parent() -> None:
    """Else a benchmark that is started again after a kill -9 would measure beside this process."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    die_with_parent()
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
