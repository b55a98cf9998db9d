"""Measure this machine for the policy search, with the engine's own functions, in under a minute.

python -m h2o_flexgen.hardware -o profile.json
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import date
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from tqdm import tqdm

from h2o_flexgen.engine.sampling import SamplingParams, sample
from h2o_flexgen.errors import UserError
from h2o_flexgen.files import check_writable
from h2o_flexgen.kv_cache import FullCache, HeavyHitterCache, KVLayout
from h2o_flexgen.models import opt
from h2o_flexgen.models.config import OPTConfig
from h2o_flexgen.offload import memory
from h2o_flexgen.offload.device import Device, Lane, as_numpy, convert, copy, finish
from h2o_flexgen.offload.disk import DiskIO, OffloadFolder, cache_root, default_root, wait
from h2o_flexgen.plan import prefill_pairs
from h2o_flexgen.search.profile import LINKS, Link, Profile

#: hidden sizes and rows of the matrix products that are timed
HIDDEN = (768, 1024, 2048)  # powers of two are slower than others: they share cache lines
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048)
HEAD_DIMS = (64, 128)
PROMPT, VOCABULARY, HEAD_TOKENS = 512, 50272, 32
RULES = {"full": FullCache(), "h2o": HeavyHitterCache(128, 128)}
#: bytes of the file that is written and read, and of one transfer
FILE, TRANSFER = 1 << 29, 1 << 26
SMALL = 1 << 22
#: a slow disk is not written to for longer
MOST_SECONDS = 1.5
#: of a profile: one that was kept by an older version is measured again
FORMAT = 3
PASSES = 3


def machine(offload_root: Path | None = None) -> dict:
    """What a profile is valid for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = {
        "processor": next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    if offload_root is not None:
        found["disk"] = _mount(offload_root)
    return found


def versions() -> dict:
    """What a profile is valid for, too."""
    return {"profile": FORMAT, **installed("torch", "h2o_flexgen")}


def installed(*names: str) -> dict[str, str]:
    """Versions of Python and of packages, if they are there."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    return found


def _mount(folder: Path) -> str:
    folder = Path(os.path.realpath(folder))
    while not os.path.ismount(folder):
        folder = folder.parent
    return str(folder)


def load_or_measure(device: Device, dtype: torch.dtype, offload_root: Path, progress: bool = True) -> Profile:
    """The profile of this machine: what was measured before if machine and versions are the same, else anew."""
    name = str(dtype).removeprefix("torch.")
    path = cache_root() / "hardware" / f"{device.torch_device.type}-{name}.json"
    try:
        profile = Profile.from_file(path)
        if (profile.machine, profile.versions) == (machine(offload_root), versions()):
            return profile
    except UserError:
        pass
    profile = measure(device, dtype, offload_root, progress)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(profile.to_json() + "\n")
        os.replace(new, path)
    except OSError as e:
        print(f"cannot keep the hardware profile in {path}: {e.strerror}", file=sys.stderr)
    return profile


@torch.inference_mode()
def measure(device: Device, dtype: torch.dtype, offload_root: Path, progress: bool = True) -> Profile:
    """Measure everything that a Profile holds; medians of three passes, since other users of a machine come and go.

    Raises:
        UserError: the offload folder cannot be written, or has no space for half a gibibyte.
    """
    if device.is_cuda and not device.workspace_bytes:
        device.start(None)
    baseline = memory.resident()
    samples = defaultdict(list)
    steps = PASSES * (len(list(_kernels(device, dtype))) + len(LINKS))
    with tqdm(total=steps, desc="measuring this machine", unit="step", disable=not progress, leave=False) as bar:
        for _ in range(PASSES):
            for key, where, make in _kernels(device, dtype):
                samples[key].append(_seconds(where, make()))
                bar.update()
            for key, seconds in _links(device, offload_root):
                samples[key].append(seconds)
                bar.update(key[0] == "link")
    seconds = {key: median(values) for key, values in samples.items()}
    small = {kind: seconds["decode", kind, "small"] for kind in RULES}
    dispatch = seconds["layer", 64, 1]

    def layer_rate(hidden: int, tokens: int) -> float:
        taken = seconds["layer", hidden, tokens]
        return 24 * hidden * hidden * tokens / max(taken - dispatch, taken / 4)

    def decode_rates(where: str) -> dict:
        return {
            kind: {
                dim: _cache_layout(rule, dtype, dim).kv_bytes
                / max(seconds[where, kind, dim] - small[kind], seconds[where, kind, dim] / 4)
                for dim in HEAD_DIMS
            }
            for kind, rule in RULES.items()
        }

    head_rate = 2 * HIDDEN[0] * VOCABULARY * HEAD_TOKENS / seconds["head",]
    ram = memory.ram_available()
    return Profile(
        machine=machine(offload_root),
        versions=versions(),
        date=date.today().isoformat(),
        command="python -m h2o_flexgen.hardware",
        device=device.torch_device.type,
        dtype=str(dtype).removeprefix("torch."),
        memory={
            "gpu": device.free_bytes() if device.is_cuda else ram,
            "cpu": ram,
            "disk": memory.disk_free(offload_root),
        },
        links={
            name: Link(
                1 / seconds["link", name],
                seconds["lost", name],
                max(0.0, 1 - seconds["link", name] / seconds["beside", name]),
                max(0.0, seconds["small", name] - seconds["link", name] * SMALL),
            )
            for name in LINKS
        },
        layer={hidden: [(n, layer_rate(hidden, n)) for n in TOKENS] for hidden in HIDDEN},
        prefill_attention={
            kind: {dim: 4 * dim * 16 * prefill_pairs(PROMPT) / seconds["prefill", kind, dim] for dim in HEAD_DIMS}
            for kind in RULES
        },
        decode_attention=decode_rates("decode"),
        cpu_attention=decode_rates("cpu") if device.is_cuda else None,
        step_seconds=dispatch + max(small.values()),
        logit_seconds=seconds["choose",] / (HEAD_TOKENS * VOCABULARY),
        head_efficiency=head_rate / layer_rate(HIDDEN[0], HEAD_TOKENS),
        convert_seconds_per_byte=seconds["convert",] / TRANSFER,
        baseline_bytes=baseline,
        workspace_bytes=device.workspace_bytes,
    )


def _kernels(device: Device, dtype: torch.dtype) -> Iterator[tuple[tuple, Device, Callable]]:
    """(what, where it runs, what makes the call that is timed) of everything that computes."""
    for hidden, counts in ((64, (1,)), *((hidden, TOKENS) for hidden in HIDDEN)):
        layers = cache(partial(_layers, device, dtype, hidden))
        for tokens in counts:
            yield ("layer", hidden, tokens), device, partial(_layer_call, device, dtype, hidden, tokens, layers)
    for kind, rule in RULES.items():
        small = (rule if kind == "full" else HeavyHitterCache(8, 8), dtype, 64, 1, 2, 17)
        yield ("decode", kind, "small"), device, partial(_decode_call, device, *small)
        for dim in HEAD_DIMS:
            yield ("prefill", kind, dim), device, partial(_prefill_call, device, dtype, rule, dim)
            yield ("decode", kind, dim), device, partial(_decode_call, device, rule, dtype, dim)
            if device.is_cuda:
                host = Device("cpu")
                yield ("cpu", kind, dim), host, partial(_decode_call, host, rule, dtype, dim)
    yield ("head",), device, partial(_head_call, device, dtype)
    yield ("choose",), device, partial(_choose_call, device, dtype)
    yield ("convert",), device, partial(_convert_call, device, dtype)


def _convert_call(device: Device, dtype: torch.dtype):
    """Weights from the other type that checkpoints come in."""
    other = torch.bfloat16 if dtype == torch.float16 else torch.float16
    dst = device.buffer(TRANSFER).view(dtype)
    src = device.buffer(dst.numel() * other.itemsize).view(other)
    src.fill_(0.5)
    return lambda: convert(dst, src)


def _head_call(device: Device, dtype: torch.dtype):
    """From hidden states to logits."""
    words = torch.full((VOCABULARY, HIDDEN[0]), 0.01, dtype=dtype, device=device.torch_device)
    x = torch.randn(HEAD_TOKENS, HIDDEN[0], device=device.torch_device).to(dtype)
    return lambda: F.linear(x, words)


def _choose_call(device: Device, dtype: torch.dtype):
    """From logits to tokens."""
    logits = torch.randn(HEAD_TOKENS, VOCABULARY, device=device.torch_device).to(dtype)
    return lambda: sample(logits, SamplingParams(), list(range(HEAD_TOKENS)), 0)


def _seconds(device: Device, work: Callable[[], object], least: float = 0.08) -> float:
    """Median time of a call, over at least `least` seconds and two calls unless one takes long, after one that does
    not count."""
    work()
    device.synchronize()
    times = []
    while len(times) < 2 and sum(times) < 0.5 or (sum(times) < least and len(times) < 100):
        start = time.perf_counter()
        work()
        device.synchronize()
        times.append(time.perf_counter() - start)
    return median(times)


def _layers(device: Device, dtype: torch.dtype, hidden: int) -> list[dict]:
    """Decoder layers, so many that their weights come from memory and not from a cache."""
    specs = opt.layers(_reference(hidden))[1].streamed
    room = min(1 << 28, memory.ram_available() // 4, device.free_bytes() // 4)
    count = 1 if hidden < 128 else 1 + room // (12 * hidden * hidden * dtype.itemsize)
    return [
        {short: torch.full(shape, 0.01, dtype=dtype, device=device.torch_device) for short, (_, shape) in specs.items()}
        for _ in range(count)
    ]


def _reference(hidden: int) -> OPTConfig:
    return OPTConfig(VOCABULARY, hidden, 1, 4 * hidden, hidden // 64, 2048, hidden)


def _layer_call(device: Device, dtype: torch.dtype, hidden: int, tokens: int, layers: Callable[[], list[dict]]):
    """A decoder layer without attention."""
    length = tokens // 16 if tokens > 256 else 1  # prompts, or new tokens
    x = torch.randn(tokens // length, length, hidden, device=device.torch_device).to(dtype)
    config, turn = _reference(hidden), cycle(layers())
    return lambda: opt.decoder_layer(config, next(turn), x, lambda q, k, v: q)


def _prefill_call(device: Device, dtype: torch.dtype, rule, dim: int):
    """Attention over prompts, 16 heads in all, of tensors as they come out of the products."""
    B, H = 2, 8
    layout = KVLayout(B, H, rule.segments(PROMPT, 1), dim, dtype, rule.scored)
    kv = layout.view(device.buffer(layout.kv_bytes), device.buffer(layout.meta_bytes))
    q, k, v = (torch.randn(B, PROMPT, H, dim, device=device.torch_device).to(dtype).transpose(1, 2) for _ in range(3))
    lengths = torch.full((B,), PROMPT)
    return lambda: rule.prefill(kv, q, k, v, lengths)


def _cache_layout(rule, dtype: torch.dtype, dim: int, B: int = 16, H: int = 16, slots: int = PROMPT) -> KVLayout:
    segments = (rule.budget + 1,) if rule.scored else (slots,)
    return KVLayout(B, H * 64 // dim, segments, dim, dtype, rule.scored)


def _decode_call(device: Device, rule, dtype: torch.dtype, dim: int, *sizes: int):
    """Attention of one token per sequence over a cache that is full."""
    layout = _cache_layout(rule, dtype, dim, *sizes)
    B, H = layout.batch, layout.heads
    kv = layout.view(device.buffer(layout.kv_bytes), device.buffer(layout.meta_bytes))
    for x in (*kv.k, *kv.v):
        x.fill_(0.5)
    if rule.scored:
        kv.score.uniform_()
        kv.position.copy_(torch.arange(layout.slots).expand(kv.position.shape))
    q, k, v = (torch.randn(B, H, 1, dim, device=device.torch_device).to(dtype) for _ in range(3))
    lengths = torch.full((B,), 4 * layout.slots if rule.scored else layout.slots - 1)
    return lambda: rule.decode(kv, q, k, v, lengths, 1)


# links


def _links(device: Device, offload_root: Path) -> Iterator[tuple[tuple, float]]:
    """Of each link the seconds of a small transfer ("small"), and the seconds per byte of a large one alone ("link"),
    while something computes ("beside"), and of compute that it cost then ("lost")."""
    pinned = device.pinned_count()
    buffer, host = device.buffer(TRANSFER), device.host_buffer(TRANSFER)
    for data in (host, buffer):
        data.fill_(1)
    x = torch.randn(64, 1024, device=device.torch_device)
    w = torch.randn(4096, 1024, device=device.torch_device)
    folder = OffloadFolder(offload_root)
    io, lane = DiskIO(), Lane(device, "measure")
    try:
        file = folder.file("measure", FILE, direct=True)
        data, target = as_numpy(host), as_numpy(device.host_buffer(TRANSFER))

        written = 0

        def write() -> int:
            nonlocal written
            ended, done = _after(MOST_SECONDS), 0
            while done < FILE and not (done and ended()):
                wait(io.write(file, data, done))
                os.fsync(file.fd)
                done += TRANSFER
            written = max(written, done)
            return done

        def read() -> int:
            ended, done = _after(MOST_SECONDS), 0
            while done < written and not (done and ended()):
                wait(io.read(file, target, done, True))
                done += TRANSFER
            return done

        def drop() -> None:
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)

        def move(into, out_of) -> int:
            for _ in range(FILE // TRANSFER):
                copy(into, out_of)
            finish(device.record())
            return FILE

        jobs = {
            "cpu_to_disk": write,
            "disk_to_cpu": read,
            "cpu_to_gpu": partial(move, buffer, host),
            "gpu_to_cpu": partial(move, host, buffer),
        }
        small = {
            "cpu_to_disk": lambda at: wait(io.write(file, data[:SMALL], at)),
            "disk_to_cpu": lambda at: wait(io.read(file, target[:SMALL], at, True)),
            "cpu_to_gpu": lambda at: (copy(buffer[:SMALL], host[:SMALL]), finish(device.record())),
            "gpu_to_cpu": lambda at: (copy(host[:SMALL], buffer[:SMALL]), finish(device.record())),
        }
        for name, job in jobs.items():
            drop()
            times = []
            for at in range(0, min(TRANSFER, 16 * SMALL), SMALL):
                start = time.perf_counter()
                lane.submit(partial(small[name], at)).result()
                times.append(time.perf_counter() - start)
            yield ("small", name), median(times)
            drop()
            moved = []
            start = time.perf_counter()
            lane.submit(lambda job=job, moved=moved: moved.append(job())).result()
            yield ("link", name), (time.perf_counter() - start) / moved[-1]
            alone = _products(device, x, w, _after(0.2))
            drop()
            start = time.perf_counter()
            future = lane.submit(lambda job=job, moved=moved: moved.append(job()))
            beside = _products(device, x, w, future.done)
            seconds = time.perf_counter() - start
            future.result()
            yield ("beside", name), seconds / moved[-1]
            yield ("lost", name), max(0.0, 1 - beside / alone) * seconds / moved[-1]
    finally:
        lane.close()
        io.close()
        folder.close()
        device.unpin(pinned)


def _after(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


def _products(device: Device, x, w, ended: Callable[[], bool]) -> float:
    """Matrix products per second until something has ended."""
    done, start = 0, time.perf_counter()
    while not ended():
        F.linear(x, w)
        finish(device.record())  # and not the copies beside it
        done += 1
    return done / (time.perf_counter() - start)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m h2o_flexgen.hardware", description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--output", help="write the profile here (default: print it)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--offload-dir", help="the folder whose disk is measured")
    args = parser.parse_args(argv)
    try:
        if args.output is not None:
            check_writable("--output", Path(args.output))
        device = Device(args.device)
        root = Path(args.offload_dir) if args.offload_dir else default_root()
        profile = measure(device, device.dtype(args.dtype), root)
        if args.output is None:
            print(profile.to_json())
        else:
            Path(args.output).write_text(profile.to_json() + "\n")
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"error: {e.strerror}: {e.filename or args.output}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
