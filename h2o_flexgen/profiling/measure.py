"""Measure this machine for the policy search, with the engine's own functions, in under a minute."""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import cache, partial
from itertools import cycle, product
from pathlib import Path
from statistics import median
from zlib import crc32

import torch
from tqdm import tqdm

from h2o_flexgen.engine.sampling import SamplingParams, sample
from h2o_flexgen.errors import UserError
from h2o_flexgen.kernels.linear import linear
from h2o_flexgen.kv_cache import CacheRule, FullCache, HeavyHitterCache, KVLayout
from h2o_flexgen.models import opt
from h2o_flexgen.models.opt import OptSpec
from h2o_flexgen.offload import memory
from h2o_flexgen.offload.device import Device, as_numpy, convert, copy, finish
from h2o_flexgen.offload.disk import DiskIO, OffloadFolder, cache_root, wait
from h2o_flexgen.offload.kv_store import KVStore
from h2o_flexgen.offload.queues import TransferQueue
from h2o_flexgen.planning.profile import LINKS, Link, Profile
from h2o_flexgen.profiling.machine import machine, mount_point, scheduled, versions
from h2o_flexgen.sizes import KV_BUFFERS, prefill_pairs, requests

log = logging.getLogger(__name__)

#: hidden sizes and rows of the matrix products that are timed
HIDDEN = {
    "cpu": (768, 1024, 2048),  # powers of two are slower than others: they share cache lines
    "cuda": (2048, 4096, 8192),  # smaller ones would measure how fast the host launches kernels
}  # but for the first only those of which a layer takes at most a quarter of the room
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048)
HEAD_DIMS = (64, 128)
PHASES = ("prefill", "decode", "cpu")  # of attention
PROMPT, SHORT, VOCABULARY, HEAD_TOKENS = 512, 32, 50272, 32
RULES = {"full": FullCache(), "h2o": HeavyHitterCache(128, 128)}
SHORT_RULES = {"full": FullCache(), "h2o": HeavyHitterCache(8, 8)}
#: bytes of the file that is written and read, and of one transfer
FILE, TRANSFER = 1 << 29, 1 << 26
#: bytes of a small one: a cache piece that comes in, the row that goes home
SMALL = {"disk_to_cpu": 1 << 22, "cpu_to_disk": 1 << 18}
#: bytes that drive others from the caches
COLD = {"cpu": 1 << 25, "cuda": 1 << 27}
#: times as many sequences in attention: as for hidden sizes
WIDER = {"cpu": 1, "cuda": 8}
#: a slow disk is not written to for longer
MOST_SECONDS = 1.5
PASSES = 3


def load_or_measure(device: Device, dtype: torch.dtype, offload_root: Path, progress: bool = True) -> Profile:
    """The profile of this machine: what was measured before if machine and versions are the same, else anew. What was
    measured beside programs that kept the processors busy is not kept."""
    name = str(dtype).removeprefix("torch.")
    disk = crc32(mount_point(offload_root).encode())  # jobs may take turns on several
    path = cache_root() / "hardware" / f"{device.torch_device.type}-{name}-{disk:08x}.json"
    try:
        profile = Profile.from_file(path)
        same = (profile.machine, profile.versions) == (machine(offload_root, device), versions())
        if same and profile.layer.keys() >= set(_sizes(device, dtype)):  # memory may have been short
            return profile
    except UserError:
        pass
    profile = measure(device, dtype, offload_root, progress)
    if profile.is_crowded:
        return profile  # the next job measures again
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(profile.to_json() + "\n")
        os.replace(new, path)
    except OSError as e:
        log.warning("cannot keep the hardware profile in %s: %s", path, e.strerror)
    return profile


@torch.inference_mode()
def measure(device: Device, dtype: torch.dtype, offload_root: Path, progress: bool = True) -> Profile:
    """Measure everything that a Profile holds; medians of three passes, since other users of a machine come and go.

    Raises:
        UserError: the offload folder cannot be written, or has no space for half a gibibyte; the card has no memory
            to measure with.
    """
    try:
        return _measure(device, dtype, offload_root, progress)
    except torch.OutOfMemoryError:
        raise UserError(
            f"{device} has too little memory left to measure its rates: end what else uses it; a job may need more "
            "--gpu-mem, or a profile by --hardware"
        ) from None


def _measure(device: Device, dtype: torch.dtype, offload_root: Path, progress: bool) -> Profile:
    if device.is_cuda and not device.workspace_bytes:
        device.start(None)
    begun = scheduled()
    baseline = memory.baseline()
    samples = defaultdict(list)
    kind = device.torch_device.type
    sizes = _sizes(device, dtype)
    steps = PASSES * (len(list(_kernels(device, dtype, sizes))) + len(LINKS))
    with tqdm(total=steps, desc="measuring this machine", unit="step", disable=not progress, leave=False) as bar:
        for _ in range(PASSES):
            for key, where, make in _kernels(device, dtype, sizes):
                samples[key].append(_seconds(where, make(), cold=key[0] in ("small", "decode", "cpu", "step")))
                bar.update()
            for key, seconds in _links(device, dtype, offload_root):
                samples[key].append(seconds)
                bar.update(key[0] == "link")
    ran, waited = (max(0.0, now - then) for now, then in zip(scheduled(), begun))
    found = _Measured({key: median(values) for key, values in samples.items()}, kind, dtype)
    rates, constants = found.attention()
    ram = memory.ram_in_all()
    profile = Profile(
        machine=machine(offload_root, device),
        versions=versions(),
        date=date.today().isoformat(),
        command="python -m h2o_flexgen.hardware",
        device=kind,
        dtype=str(dtype).removeprefix("torch."),
        memory={
            "gpu": device.free_bytes() if device.is_cuda else ram,
            "cpu": ram,
            "disk": memory.disk_free(offload_root),
        },
        links={name: found.link(name) for name in LINKS},
        layer={hidden: [(n, found.matmul_rate(hidden, n)) for n in TOKENS] for hidden in sizes},
        prefill_attention=rates["prefill"],
        decode_attention=rates["decode"],
        cpu_attention=rates.get("cpu"),
        head_seconds=constants,
        visit_seconds=found.visit_seconds(),
        step_seconds=found("step") + max(found("small", rule) for rule in RULES),
        logit_seconds=found("choose") / (HEAD_TOKENS * VOCABULARY),
        head_efficiency=found.head_rate() / found.matmul_rate(HIDDEN[kind][0], HEAD_TOKENS),
        convert_seconds_per_byte=found("convert") / TRANSFER,
        baseline_bytes=baseline,
        workspace_bytes=device.workspace_bytes,
        crowded=waited / (ran + waited) if waited else 0.0,
    )
    if profile.is_crowded:
        log.warning(
            "other programs kept this one waiting for a processor %.0f%% of the time while the machine was measured: "
            "its rates may be too low, and a policy by them poor; close them and run the command again",
            100 * profile.crowded,
        )
    return profile


def _sizes(device: Device, dtype: torch.dtype) -> list[int]:
    """Hidden sizes of the layers that there is memory to measure now."""
    first, *others = HIDDEN[device.torch_device.type]
    return [first, *(n for n in others if _layer_bytes(n, dtype) <= device.free_bytes() // 4)]


@dataclass(frozen=True)
class _Measured:
    """Median seconds of everything that was timed, by the keys of `_kernels` and `_links`; what follows from them."""

    seconds: dict[tuple, float]
    device: str
    dtype: torch.dtype

    def __call__(self, *key) -> float:
        return self.seconds[key]

    def matmul_rate(self, hidden: int, tokens: int) -> float:
        """Flops per second of a decoder layer's products."""
        return 24 * hidden * hidden * tokens / _beyond(self("layer", hidden, tokens), self("step"))

    def head_rate(self) -> float:
        """Flops per second of the product with the vocabulary."""
        return 2 * HIDDEN[self.device][0] * VOCABULARY * HEAD_TOKENS / self("head")

    def link(self, name: str) -> Link:
        return Link(
            1 / self("link", name),
            self("lost", name),
            max(0.0, 1 - self("link", name) / self("beside", name)),
            self._each_request("small", "link", name),
            self._each_request("lost small", "lost", name),
        )

    def _each_request(self, what: str, per_byte: str, name: str) -> float:
        """The part of a small transfer that its bytes do not explain, for each of its requests."""
        if name not in SMALL:
            return 0.0
        size = SMALL[name]
        return max(0.0, self(what, name) - self(per_byte, name) * size) / requests(size)

    def visit_seconds(self) -> float:
        """What a visit takes from compute besides its bytes and its requests: one reads the piece, one its log, one
        writes the new row."""
        layout = VISITED.layout(self.dtype)
        known = layout.kv_bytes * self("lost", "disk_to_cpu") + layout.row_bytes * self("lost", "cpu_to_disk")
        for name in ("disk_to_cpu", "disk_to_cpu", "cpu_to_disk"):
            known += self._each_request("lost small", "lost", name)
        return max(0.0, self("visit") - known)

    def attention(self) -> tuple[dict, dict]:
        """Per phase and kind of cache: flops or bytes per second by head size, and the seconds that a head takes
        whatever its length."""
        rates, constants = defaultdict(dict), defaultdict(dict)
        for phase, kind in sorted({key[:2] for key in self.seconds if key[0] in PHASES}):
            each, work = {}, {}  # of one head: seconds, and flops or bytes
            for size in (*HEAD_DIMS, "short"):
                case = _Attention.of(phase, kind, size, self.device)
                each[size] = _beyond(self(phase, kind, size), self("small", kind)) / (case.batch * case.heads)
                work[size] = case.work(phase, self.dtype)
            first = HEAD_DIMS[0]
            slope = _beyond(each[first], each["short"]) / (work[first] - work["short"])
            constant = constants[phase][kind] = max(0.0, each["short"] - slope * work["short"])
            rates[phase][kind] = {dim: work[dim] / _beyond(each[dim], constant) for dim in HEAD_DIMS}
        return dict(rates), dict(constants)


def _beyond(taken: float, known: float) -> float:
    """A time without a part of it that is known; noise must not make it vanish."""
    return max(taken - known, taken / 4)


def _kernels(device: Device, dtype: torch.dtype, sizes: list[int]) -> Iterator[tuple[tuple, Device, Callable]]:
    """(what, where it runs, what makes the call that is timed) of everything that computes."""
    yield ("step",), device, partial(_layer_call, device, dtype, 64, 1, partial(_layers, device, dtype, 64))
    for hidden in sizes:
        layers = cache(partial(_layers, device, dtype, hidden))
        for tokens in TOKENS:
            yield ("layer", hidden, tokens), device, partial(_layer_call, device, dtype, hidden, tokens, layers)
        del layers
    for kind in RULES:
        smallest = _Attention(SHORT_RULES[kind], 1, 2, 64, SHORT)
        yield ("small", kind), device, partial(_decode_call, device, dtype, smallest)
        for phase, size in product(PHASES, (*HEAD_DIMS, "short")):
            case = _Attention.of(phase, kind, size, device.torch_device.type)
            if phase != "cpu":
                call = _prefill_call if phase == "prefill" else _decode_call
                yield (phase, kind, size), device, partial(call, device, dtype, case)
            elif device.is_cuda:
                host = Device("cpu")
                yield (phase, kind, size), host, partial(_decode_call, host, dtype, case)
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
    hidden = HIDDEN[device.torch_device.type][0]
    words = torch.full((VOCABULARY, hidden), 0.01, dtype=dtype, device=device.torch_device)
    x = torch.randn(HEAD_TOKENS, hidden, device=device.torch_device).to(dtype)
    return lambda: linear(x, words)


def _choose_call(device: Device, dtype: torch.dtype):
    """From logits to tokens."""
    logits = torch.randn(HEAD_TOKENS, VOCABULARY, device=device.torch_device).to(dtype)
    return lambda: sample(logits, SamplingParams(), list(range(HEAD_TOKENS)), 0)


def _seconds(device: Device, work: Callable[[], object], least: float = 0.08, cold: bool = False) -> float:
    """Median time of a call, over at least `least` seconds and two calls unless one takes long, after one that does
    not count. `cold`: with other data in the caches, as after the products of a layer."""
    work()
    device.synchronize()
    times, other = [], device.buffer(COLD[device.torch_device.type] if cold else 0)
    while len(times) < 2 and sum(times) < 0.5 or (sum(times) < least and len(times) < (20 if cold else 100)):
        other.add_(1)
        device.synchronize()
        start = time.perf_counter()
        work()
        device.synchronize()
        times.append(time.perf_counter() - start)
    return median(times)


def _layers(device: Device, dtype: torch.dtype, hidden: int) -> list[dict]:
    """Decoder layers, so many that their weights come from memory and not from a cache."""
    specs = opt.tensors(_reference(hidden))[1].streamed
    room = min(1 << 28, memory.ram_available() // 4, device.free_bytes() // 4)
    count = 1 if hidden < 128 else 1 + room // _layer_bytes(hidden, dtype)
    return [
        {short: torch.full(shape, 0.01, dtype=dtype, device=device.torch_device) for short, (_, shape) in specs.items()}
        for _ in range(count)
    ]


def _layer_bytes(hidden: int, dtype: torch.dtype) -> int:
    return 12 * hidden * hidden * dtype.itemsize


def _reference(hidden: int) -> OptSpec:
    return OptSpec(
        "opt", 1, hidden, 4 * hidden, VOCABULARY, hidden // 64, hidden // 64, 64, 2048, "relu", word_width=hidden
    )


def _layer_call(device: Device, dtype: torch.dtype, hidden: int, tokens: int, layers: Callable[[], list[dict]]):
    """A decoder layer without attention."""
    length = tokens // 16 if tokens > 256 else 1  # prompts, or new tokens
    x = torch.randn(tokens // length, length, hidden, device=device.torch_device).to(dtype)
    config, turn = _reference(hidden), cycle(layers())
    return lambda: opt.block(config, next(turn), x, None, lambda q, k, v: q)


@dataclass(frozen=True)
class _Attention:
    """An attention that is timed: of prompts of so many tokens, or of one token over as many slots."""

    rule: CacheRule
    batch: int
    heads: int
    head_dim: int
    tokens: int

    @classmethod
    def of(cls, phase: str, kind: str, size: int | str, device: str) -> _Attention:
        """`size`: a head size, or "short"; `device`: of the profile."""
        times = WIDER["cpu" if phase == "cpu" else device]
        if size == "short":
            return cls(SHORT_RULES[kind], 16 * times, 16, HEAD_DIMS[0], SHORT)
        return cls(RULES[kind], times * (1 if phase == "prefill" else 16), 1024 // size, size, PROMPT)

    def layout(self, dtype: torch.dtype, decode: bool = True) -> KVLayout:
        segments = self.rule.segments(self.tokens, 1)
        if decode and not self.rule.scored:  # behind the prompt it has grown
            segments = (self.tokens // 2, self.tokens // 2)
        return KVLayout(self.batch, self.heads, segments, self.head_dim, dtype, self.rule.scored)

    def work(self, phase: str, dtype: torch.dtype) -> int:
        """Flops, or bytes of K and V, of one head of one sequence."""
        if phase == "prefill":
            return 4 * self.head_dim * prefill_pairs(self.tokens)
        return self.layout(dtype).kv_bytes // (self.batch * self.heads)


#: the cache pieces that come and go while something computes
VISITED = _Attention(RULES["full"], 4, 16, 64, SHORT)


def _prefill_call(device: Device, dtype: torch.dtype, case: _Attention):
    """Attention over prompts, of tensors as they come out of the products."""
    layout, rule = case.layout(dtype, decode=False), case.rule
    kv = layout.view(device.buffer(layout.kv_bytes), device.buffer(layout.meta_bytes))
    shape = (case.batch, case.tokens, case.heads, case.head_dim)
    q, k, v = (torch.randn(shape, device=device.torch_device).to(dtype).transpose(1, 2) for _ in range(3))
    lengths = torch.full((case.batch,), case.tokens)
    return lambda: rule.prefill(kv, q, k, v, lengths)


def _decode_call(device: Device, dtype: torch.dtype, case: _Attention):
    """Attention of one token per sequence over a cache that is full."""
    layout = case.layout(dtype)
    return attention_call(device, case.rule, layout, 4 * layout.slots if case.rule.scored else layout.slots - 1, 1)


def attention_call(device: Device, rule: CacheRule, layout: KVLayout, length: int, step: int) -> Callable[[], object]:
    """Attention of a decode step after prompts of `length` tokens, over a cache of its own."""
    B, H = layout.batch, layout.heads
    kv = layout.view(device.buffer(layout.kv_bytes), device.buffer(layout.meta_bytes))
    for x in (*kv.k, *kv.v):
        x.fill_(0.5)
    if rule.scored:
        kv.score.uniform_()
        kv.position.copy_(torch.arange(layout.slots).expand(kv.position.shape))
    shape = (B, H, 1, layout.head_dim)
    q, k, v = (torch.randn(shape, device=device.torch_device).to(layout.dtype) for _ in range(3))
    lengths = torch.full((B,), length)
    return lambda: rule.decode(kv, q, k, v, lengths, step)


# links


def _links(device: Device, dtype: torch.dtype, offload_root: Path) -> Iterator[tuple[tuple, float]]:
    """Of each link the seconds per byte of large transfers alone ("link"), while something computes ("beside"), and of
    compute that it cost then ("lost"); of the disk the seconds of a small transfer too ("small", "lost small")."""
    pinned = device.pinned_count()
    buffer, host = device.buffer(TRANSFER), device.host_buffer(TRANSFER)
    for data in (host, buffer):
        data.fill_(1)
    hidden = HIDDEN[device.torch_device.type][0]
    work = _layer_call(device, dtype, hidden, HEAD_TOKENS, partial(_layers, device, dtype, hidden))
    folder = OffloadFolder(offload_root)
    io, lane = DiskIO(), TransferQueue(device, "measure")
    try:
        file = folder.file("measure", FILE)
        data, target = as_numpy(host), as_numpy(device.host_buffer(TRANSFER))

        written = 0

        def write() -> int:
            nonlocal written
            ended, done = _after(MOST_SECONDS), 0
            while done < FILE and not (done and ended()):
                wait(io.write(file, data, done, True))
                done += TRANSFER
            written = max(written, done)
            return done

        def read() -> int:
            ended, done = _after(MOST_SECONDS), 0
            while done < written and not (done and ended()):
                wait(io.read(file, target, done, True))
                done += TRANSFER
            return done

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

        def small_ones(name: str, seconds: float) -> int:
            """Small transfers one after the other; how many."""
            call, part = {"cpu_to_disk": (io.write, data), "disk_to_cpu": (io.read, target)}[name]
            ended, size, count = _after(seconds), SMALL[name], 0
            while not (count and ended()):
                wait(call(file, part[:size], count * size % TRANSFER, True))
                count += 1
            return count

        def timed(job: Callable[[], int], alone: float | None = None) -> tuple[float, float]:
            """Seconds for each thing that a job moves, and those of compute that it takes away: from `work` beside it,
            which makes `alone` calls per second otherwise. Without `alone` nothing computes."""
            moved, share = [], 0.0
            start = time.perf_counter()
            future = lane.submit(lambda: moved.append(job()))
            if alone is not None:
                share = max(0.0, 1 - _repeat(device, work, future.done) / alone)
            future.result()
            seconds = (time.perf_counter() - start) / moved[0]
            return seconds, share * seconds

        for name, job in jobs.items():
            yield ("link", name), timed(job)[0]
            alone = _repeat(device, work, _after(0.2))
            beside, lost = timed(job, alone)
            yield ("beside", name), beside
            yield ("lost", name), lost
            if name in SMALL:
                yield ("small", name), timed(partial(small_ones, name, 0.1))[0]
                yield ("lost small", name), timed(partial(small_ones, name, 0.2), alone)[1]
        alone = _repeat(device, work, _after(0.2))
        yield ("visit",), max(0.0, 1 / _visits(device, dtype, work, io, folder.file) - 1 / alone)
    finally:
        lane.close()
        io.close()
        folder.close()
        device.unpin(pinned)


def _visits(device: Device, dtype: torch.dtype, work: Callable[[], object], io: DiskIO, make_file) -> float:
    """Calls per second of `work` while before each a piece of a full cache comes from disk, and after it goes back."""
    layout, held = VISITED.layout(dtype), VISITED.tokens - 1
    lanes = [TransferQueue(device, "cache", workers=KV_BUFFERS), TransferQueue(device, "store")]
    try:
        pieces = [(0, 0), (0, 1)]
        store = KVStore(device, [layout] * 2, dict.fromkeys(pieces, "disk"), io, *lanes, make_file)
        store.begin_block([layout] * 2)
        for piece in pieces:
            store.blank(*piece)
            store.store_all(*piece, held)
        slots = torch.full((layout.batch, layout.heads), held, device=device.torch_device)
        k = torch.zeros(layout.batch, layout.heads, layout.head_dim, dtype=dtype, device=device.torch_device)
        done, ended, start = 0, _after(0.3), time.perf_counter()
        while done < 2 or not ended():
            now, following = pieces[done % 2], pieces[(done + 1) % 2]
            store.prefetch(*now, held)
            store.prefetch(*following, held)
            store.get(*now, held)
            work()
            store.store_step(*now, held, slots, k, k)
            finish(device.record())
            done += 1
        rate = done / (time.perf_counter() - start)
        store.drain()
        return rate
    finally:
        for each in lanes:
            each.close()


def _after(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


def _repeat(device: Device, work: Callable[[], object], ended: Callable[[], bool]) -> float:
    """Calls per second until something has ended."""
    done, start = 0, time.perf_counter()
    while not (done and ended()):
        work()
        finish(device.record())  # and not the copies beside it
        done += 1
    return done / (time.perf_counter() - start)
