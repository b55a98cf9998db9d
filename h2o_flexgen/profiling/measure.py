"""Measure this machine for the policy search, with the engine's own functions, in under a minute."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from dataclasses import asdict, astuple, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from zlib import crc32

import torch
from tqdm import tqdm

from h2o_flexgen.errors import UserError
from h2o_flexgen.kernels import linear
from h2o_flexgen.kernels.linear import KernelRates, dtype_name
from h2o_flexgen.kv_cache import RULES
from h2o_flexgen.offload import memory
from h2o_flexgen.offload.device import Device
from h2o_flexgen.planning.profile import CROWDED, AttentionRates, Link, Profile, Rates, Shape
from h2o_flexgen.profiling.compute import HEAD_DIMS, LAYER_MATMULS, Attention, Scale, compute_seconds, scale_for
from h2o_flexgen.profiling.links import measure_links
from h2o_flexgen.profiling.machine import crowding, here, keep, kept_file, mount_point, read_kept, scheduled

log = logging.getLogger(__name__)


# measured before, or now


def job_dtype(
    device: Device, name: str, stored: torch.dtype | None = None, kernels: KernelRates | None = None
) -> torch.dtype:
    """The dtype that a job computes in, as `Device.dtype` says, by kernels as they were measured on this machine, or
    by `kernels` of a given profile."""
    if kernels is not None:
        linear.use(kernels)
    elif not device.is_cuda and name not in ("float32", "fp32") and not linear.are_known():
        linear.use(load_or_measure_kernels())
    return device.dtype(name, stored)


def load_or_measure_kernels() -> KernelRates:
    """What was measured before if machine and versions are the same, else anew. Rates measured beside programs that
    kept the CPU busy are not kept."""
    path, origin = kept_file("kernels"), here()
    try:
        return KernelRates.from_dict(read_kept(path, origin)["rates"])
    except (KeyError, TypeError, ValueError, AttributeError):  # there is none, or it is damaged
        pass
    before = scheduled()
    rates = linear.measure()
    if crowding(before, scheduled()) <= CROWDED:
        keep(path, json.dumps({**origin, "rates": asdict(rates)}, indent=1))
    return rates


def load_or_measure(device: Device, dtype: torch.dtype, offload_root: Path, progress: bool = True) -> Profile:
    """The profile of this machine: what was measured before if machine and versions are the same, else anew. Rates
    measured beside programs that kept the CPU busy are not kept."""
    disk = crc32(mount_point(offload_root).encode())  # jobs may take turns on several
    path = kept_file(f"{device.torch_device.type}-{dtype_name(dtype)}-{disk:08x}")
    try:
        profile = Profile.from_dict(read_kept(path, here(offload_root, device)) or {})
    except UserError:
        profile = measure(device, dtype, offload_root, progress)
        if not profile.is_crowded:
            keep(path, profile.to_json())
    if profile.kernels is not None:
        linear.use(profile.kernels)
    return profile


@torch.inference_mode()
def measure(
    device: Device, dtype: torch.dtype, offload_root: Path, progress: bool = True, scale: Scale | None = None
) -> Profile:
    """Measure everything that a Profile holds.

    Raises:
        UserError: the offload folder cannot be written, or has no space for 0.3 GB; the GPU has too little memory.
    """
    scale = scale or scale_for(device)
    if device.is_cuda and not device.workspace_bytes:
        device.start(None)
    before, baseline = scheduled(), memory.baseline()
    try:
        found, links = _passes(device, dtype, offload_root, progress, scale)
    except torch.OutOfMemoryError:
        raise UserError(
            f"{device} has too little memory left to measure its rates: end what else uses it; a job may need a higher "
            "limit of device memory, or a hardware profile that is given"
        ) from None
    ram = memory.ram_in_all()
    gpu = device.free_bytes() if device.is_cuda else ram
    profile = Profile(
        **here(offload_root, device),
        date=date.today().isoformat(),
        command="python -m h2o_flexgen.hardware",
        device=device.torch_device.type,
        dtype=dtype_name(dtype),
        memory={"gpu": gpu, "cpu": ram, "disk": memory.disk_free(offload_root)},
        links=links,
        matmul=found.matmul(),
        attention=found.attention(),
        step_seconds=found("step") + max(found("small", rule) for rule in RULES),
        baseline_bytes=baseline,
        workspace_bytes=device.workspace_bytes,
        crowded=crowding(before, scheduled()),
        kernels=None if device.is_cuda or dtype == torch.float32 else linear.rates(),
    )
    if profile.is_crowded:
        log.warning(
            "other programs kept this one waiting for a CPU core %.0f%% of the time while the machine was measured: "
            "its rates may be too low, and a policy by them poor; close them and run the command again",
            100 * profile.crowded,
        )
    return profile


def _passes(
    device: Device, dtype: torch.dtype, offload_root: Path, progress: bool, scale: Scale
) -> tuple[Measured, dict[str, Link]]:
    """Medians of all passes."""
    seconds, links = defaultdict(list), defaultdict(list)
    for _ in tqdm(range(scale.passes), "measuring this machine", unit="pass", disable=not progress, leave=False):
        for key, taken in compute_seconds(device, dtype, scale):
            seconds[key].append(taken)
        for name, link in measure_links(device, dtype, offload_root, scale).items():
            links[name].append(astuple(link))
    found = Measured({key: median(values) for key, values in seconds.items()}, dtype, scale)
    return found, {name: Link(*map(median, zip(*values))) for name, values in links.items()}


@dataclass(frozen=True)
class Measured:
    """Seconds of everything that computes, by the keys of `compute_seconds`, and what follows."""

    seconds: dict[tuple, float]
    dtype: torch.dtype
    scale: Scale

    def __call__(self, *key) -> float:
        return self.seconds[key]

    def matmul(self) -> dict[str, dict[Shape, Rates]]:
        """Rates without what a matmul takes whatever its size, which counts as part of a step."""
        each, found = self("step") / LAYER_MATMULS, {}
        for _, kind, (out, width), rows in (key for key in self.seconds if key[0] == "matmul"):
            seconds = beyond(self("matmul", kind, (out, width), rows), each)
            found.setdefault(kind, {}).setdefault((out, width), {})[rows] = 2 * out * width * rows / seconds
        return found

    def attention(self) -> dict[str, dict[str, AttentionRates]]:
        """By phase and rule."""
        phases = {key[0] for key in self.seconds if key[-1] == "short"}
        return {phase: {rule: self._attention(phase, rule) for rule in RULES} for phase in phases}

    def _attention(self, phase: str, rule: str) -> AttentionRates:
        """From head sizes and lengths follow what the work takes, and what a head takes whatever its work."""
        each, work = {}, {}  # of one head: seconds, and flops or bytes
        for size in (*HEAD_DIMS, "short"):
            case = Attention.of(phase, rule, size, self.scale)
            each[size] = beyond(self(phase, rule, size), self("small", rule)) / (case.batch * case.heads)
            work[size] = case.work(phase, self.dtype)
        first = HEAD_DIMS[0]
        slope = beyond(each[first], each["short"]) / (work[first] - work["short"])
        constant = max(0.0, each["short"] - slope * work["short"])
        rates = {dim: work[dim] / beyond(each[dim], constant) for dim in HEAD_DIMS}
        grouped = 1.0 if phase == "prefill" else self(phase, rule, "grouped") / self(phase, rule, first)
        return AttentionRates(rates, constant, grouped)


def beyond(taken: float, known: float) -> float:
    """A time without a part of it that is known; noise must not make it vanish."""
    return max(taken - known, taken / 4)
