"""Measure this machine for the policy search, with the engine's own functions, in under a minute.

python -m h2o_flexgen.hardware -o profile.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from tqdm import tqdm

from h2o_flexgen.engine.sampling import SamplingParams, sample
from h2o_flexgen.errors import UserError
from h2o_flexgen.kv_cache import FullCache, HeavyHitterCache, KVLayout
from h2o_flexgen.models import opt
from h2o_flexgen.models.config import OPTConfig
from h2o_flexgen.offload import memory
from h2o_flexgen.offload.device import Device, Lane, as_numpy, copy
from h2o_flexgen.offload.disk import DiskIO, File, cache_root, default_root, wait
from h2o_flexgen.plan import prefill_pairs
from h2o_flexgen.search.profile import Link, Profile

#: hidden sizes and rows of the matrix products that are timed
HIDDEN = (768, 2048)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
HEAD_DIMS = (64, 128)
#: bytes of the file that is written and read, and of one transfer
FILE, TRANSFER = 1 << 29, 1 << 26


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
    found = {"python": platform.python_version()}
    for name in ("torch", "h2o_flexgen"):
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
    """Measure everything that a Profile holds.

    Raises:
        UserError: the offload folder cannot be written, or has no space for half a gibibyte.
    """
    if device.is_cuda:
        device.start(None)
    baseline = memory.resident()
    tiny = _layer_seconds(device, dtype, 64, 1)
    steps = 2 + len(HIDDEN) * len(TOKENS) + 2 * len(HEAD_DIMS) * (3 if device.is_cuda else 2) + 4
    with tqdm(total=steps, desc="measuring this machine", unit="step", disable=not progress, leave=False) as bar:

        def timed(result):
            bar.update()
            return result

        layer = {hidden: [(n, timed(_layer_rate(device, dtype, hidden, n, tiny))) for n in TOKENS] for hidden in HIDDEN}
        prefill, decode, on_cpu = ({"full": {}, "h2o": {}} for _ in range(3))
        small = 0.0
        for kind, rule in (("full", FullCache()), ("h2o", HeavyHitterCache(128, 128))):
            small = max(small, _decode_seconds(device, dtype, rule, 1, 2, 64, 16)[0])
            for dim in HEAD_DIMS:
                prefill[kind][dim] = timed(_prefill_rate(device, dtype, rule, dim))
                decode[kind][dim] = timed(_decode_rate(device, dtype, rule, dim, small))
                if device.is_cuda:
                    on_cpu[kind][dim] = timed(_decode_rate(Device("cpu"), dtype, rule, dim, small))
        logits = torch.randn(32, 50272, device=device.torch_device).to(dtype)
        choose = partial(sample, logits, SamplingParams(), list(range(32)), 0)
        logit_seconds = timed(_seconds(device, choose)) / logits.numel()
        links = _links(device, offload_root, timed)
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
        links=links,
        layer=layer,
        prefill_attention=prefill,
        decode_attention=decode,
        cpu_attention=on_cpu if device.is_cuda else None,
        step_seconds=tiny + small,
        logit_seconds=logit_seconds,
        baseline_bytes=baseline,
        workspace_bytes=device.workspace_bytes,
    )


def _seconds(device: Device, work: Callable[[], object], least: float = 0.2) -> float:
    """Median time of a call, over at least two calls and `least` seconds, after one that does not count."""
    work()
    device.synchronize()
    times = []
    while len(times) < 2 or (sum(times) < least and len(times) < 200):
        start = time.perf_counter()
        work()
        device.synchronize()
        times.append(time.perf_counter() - start)
    return median(times)


def _reference(hidden: int) -> OPTConfig:
    return OPTConfig(50272, hidden, 1, 4 * hidden, hidden // 64, 2048, hidden)


def _layer_seconds(device: Device, dtype: torch.dtype, hidden: int, tokens: int) -> float:
    """A decoder layer without attention, on weights that come from memory and not from a cache."""
    config = _reference(hidden)
    specs = opt.layers(config)[1].streamed
    nbytes = 12 * hidden * hidden * dtype.itemsize
    count = 1 if hidden < 128 else 1 + max(1, (1 << 28) // nbytes)
    layers = [
        {short: torch.full(shape, 0.01, dtype=dtype, device=device.torch_device) for short, (_, shape) in specs.items()}
        for _ in range(count)
    ]
    x = torch.randn(tokens, 1, hidden, device=device.torch_device).to(dtype)
    turn = cycle(layers)
    return _seconds(device, lambda: opt.decoder_layer(config, next(turn), x, lambda q, k, v: q))


def _layer_rate(device: Device, dtype: torch.dtype, hidden: int, tokens: int, tiny: float) -> float:
    seconds = _layer_seconds(device, dtype, hidden, tokens)
    return 24 * hidden * hidden * tokens / max(seconds - tiny, seconds / 4)


def _prefill_rate(device: Device, dtype: torch.dtype, rule, dim: int, length: int = 512) -> float:
    B, H = 2, 8
    layout = KVLayout(B, H, rule.segments(length, 1), dim, dtype, rule.scored)
    cache = layout.view(device.buffer(layout.kv_bytes), device.buffer(layout.meta_bytes))
    q, k, v = (torch.randn(B, H, length, dim, device=device.torch_device).to(dtype) for _ in range(3))
    lengths = torch.full((B,), length)
    seconds = _seconds(device, lambda: rule.prefill(cache, q, k, v, lengths))
    return 4 * dim * B * H * prefill_pairs(length) / seconds


def _decode_seconds(device: Device, dtype: torch.dtype, rule, B: int, H: int, dim: int, S: int) -> tuple[float, int]:
    """Seconds of one decode step over a cache, and its bytes of K and V."""
    segments = (2 * rule.heavy + 1,) if rule.scored else (S,)
    layout = KVLayout(B, H, segments, dim, dtype, rule.scored)
    cache = layout.view(device.buffer(layout.kv_bytes), device.buffer(layout.meta_bytes))
    for x in (*cache.k, *cache.v):
        x.fill_(0.5)
    if rule.scored:
        cache.score.uniform_()
        cache.position.copy_(torch.arange(layout.slots).expand(cache.position.shape))
    q, k, v = (torch.randn(B, H, 1, dim, device=device.torch_device).to(dtype) for _ in range(3))
    lengths = torch.full((B,), layout.slots - 1 if not rule.scored else 4 * rule.heavy)
    seconds = _seconds(device, lambda: rule.decode(cache, q, k, v, lengths, 1))
    return seconds, layout.kv_bytes


def _decode_rate(device: Device, dtype: torch.dtype, rule, dim: int, small: float) -> float:
    seconds, nbytes = _decode_seconds(device, dtype, rule, 16, 16 if dim == 64 else 8, dim, 512)
    return nbytes / max(seconds - small, seconds / 4)


# links


def _links(device: Device, offload_root: Path, timed) -> dict[str, Link]:
    buffer, host = device.buffer(TRANSFER), device.host_buffer(TRANSFER)
    host.fill_(1)
    buffer.fill_(1)
    x = torch.randn(64, 1024, device=device.torch_device)
    w = torch.randn(4096, 1024, device=device.torch_device)
    alone = _products(device, x, w, seconds=0.5)
    io, lane = DiskIO(), Lane(device, "measure")

    def link(job: Callable[[], int], again: Callable[[], None] = lambda: None) -> Link:
        """`job` moves bytes and says how many."""
        rate = _rate(lane, job, again)
        again()
        start = time.perf_counter()
        future = lane.submit(job_bytes := _Count(job))
        done = 0
        while not future.done():
            F.linear(x, w)
            device.synchronize()
            done += 1
        seconds = time.perf_counter() - start
        lost = max(0.0, 1 - done / seconds / alone) * seconds
        return timed(Link(rate, lost / job_bytes.bytes))

    try:
        with _scratch_file(offload_root) as file:
            data, target = as_numpy(host), as_numpy(device.host_buffer(TRANSFER))

            def write() -> int:
                for at in range(0, FILE, TRANSFER):
                    wait(io.write(file, data, at))
                os.fsync(file.fd)
                return FILE

            def read() -> int:
                for at in range(0, FILE, TRANSFER):
                    wait(io.read(file, target, at, True))
                return FILE

            def drop() -> None:
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)

            links = {"cpu_to_disk": link(write), "disk_to_cpu": link(read, drop)}

        def move(into, out_of) -> int:
            for _ in range(8):
                copy(into, out_of)
            device.synchronize()
            return 8 * TRANSFER

        links["cpu_to_gpu"] = link(lambda: move(buffer, host))
        links["gpu_to_cpu"] = link(lambda: move(host, buffer))
    finally:
        lane.close()
        io.close()
        device.unpin()
    return links


class _Count:
    def __init__(self, job: Callable[[], int]):
        self.job, self.bytes = job, 0

    def __call__(self) -> None:
        self.bytes = self.job()


def _rate(lane: Lane, job: Callable[[], int], again: Callable[[], None]) -> float:
    rates = []
    for _ in range(3):
        again()
        count = _Count(job)
        start = time.perf_counter()
        lane.submit(count).result()
        rates.append(count.bytes / (time.perf_counter() - start))
    return median(rates)


def _products(device: Device, x, w, seconds: float) -> float:
    """Matrix products per second."""
    F.linear(x, w)
    device.synchronize()
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        F.linear(x, w)
        device.synchronize()
        done += 1
    return done / (time.perf_counter() - start)


@contextmanager
def _scratch_file(offload_root: Path):
    try:
        offload_root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=offload_root, prefix="h2o_flexgen-measure-") as folder:
            file = File(Path(folder) / "data", writable=True, direct=True)
            file.allocate(FILE)
            yield file
            file.close()
    except OSError as e:
        raise UserError(
            f"cannot write to the offload folder {offload_root} ({e.strerror}): name another --offload-dir"
        ) from None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m h2o_flexgen.hardware", description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--output", help="write the profile here (default: print it)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--offload-dir", help="the folder whose disk is measured")
    args = parser.parse_args(argv)
    try:
        device = Device(args.device)
        root = Path(args.offload_dir) if args.offload_dir else default_root()
        profile = measure(device, device.dtype(args.dtype), root)
        text = json.dumps(json.loads(profile.to_json()), indent=1)
        if args.output is None:
            print(text)
        else:
            Path(args.output).write_text(text + "\n")
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"error: cannot write {args.output}: {e.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
