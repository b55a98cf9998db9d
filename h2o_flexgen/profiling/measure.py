"""Measure this machine for the policy search, with the engine's own functions, in about a minute."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, is_dataclass, replace
from datetime import date
from operator import itemgetter
from pathlib import Path
from statistics import median
from zlib import crc32

import torch

from h2o_flexgen.engine.model import prepare_loops
from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import dtype_name
from h2o_flexgen.kernels import linear
from h2o_flexgen.kernels.rates import KernelRates
from h2o_flexgen.machine import memory
from h2o_flexgen.machine.device import Device, check_devices, open_device, pool_names
from h2o_flexgen.machine.profile import Profile
from h2o_flexgen.profiling.compute import CUDA, Scale, known_seconds, measure_compute, remainder
from h2o_flexgen.profiling.links import measure_links
from h2o_flexgen.profiling.machine import (
    CROWDED,
    crowding,
    keep,
    kept_file,
    machine,
    mount_point,
    read_kept,
    scheduled,
    stamp,
)
from h2o_flexgen.storage.disk import default_root
from h2o_flexgen.utils.progress import bar

log = logging.getLogger(__name__)


# measured before, or now


def job_dtype(
    device: Device, name: str, stored: str | None = None, profile: Profile | None = None, compute: str = "exact"
) -> torch.dtype:
    """The dtype that a job computes in, from `Device.dtype` with the kernel rates of this machine, or of a given
    profile. In fp32 only matmuls in int8 have a choice of kernels. `name`: the dtype asked for; `stored`: the type of
    the checkpoint, if known. Raises UserError if the dtype is unknown, or the profile was measured with another one."""
    if profile is not None and profile.kernels is not None:
        linear.use(profile.kernels)
    elif not device.is_cuda and (compute == "int8" or name not in ("float32", "fp32")) and not linear.are_known():
        linear.use(load_or_measure_kernels())
    dtype = device.dtype(name, stored and getattr(torch, stored))
    found = dtype_name(dtype)
    kind = device.torch_device.type
    if profile is not None and (profile.device, profile.dtype) != (kind, found):
        raise UserError(
            f"the hardware profile was measured in {profile.dtype} on {profile.device}, but this job computes in "
            f"{found} on {kind}: measure again, or pass another `device` or `dtype`"
        )
    if compute == "int8" and not device.is_cuda and not linear.rates().gains_by_int8(found):
        log.warning("on this CPU matmuls in int8 are no faster than in %s: leave out `compute` int8", found)
    return dtype


def load_or_measure_kernels() -> KernelRates:
    """The kept rates if machine and versions are still the same, else new ones. Rates measured beside busy programs are
    not kept."""
    path = kept_file("kernels")
    origin = stamp()
    try:
        return KernelRates.from_dict(read_kept(path, origin)["rates"])
    except (KeyError, TypeError, ValueError, AttributeError):  # the file is missing, or damaged
        pass
    before = scheduled()
    rates = linear.measure()
    if crowding(before, scheduled()) <= CROWDED:
        keep(path, json.dumps({**origin, "rates": asdict(rates)}, indent=1))
    return rates


def load_or_measure(device: Device, dtype: torch.dtype, offload_root: Path, progress: bool = True) -> Profile:
    """The kept profile of this machine if it and all versions are still the same, else a new one. Rates measured beside
    busy programs are not kept."""
    profile = kept_profile(device, dtype, offload_root)
    if profile is None:
        profile = measure(device, dtype, offload_root, progress)
        if profile.crowded <= CROWDED:
            keep(_profile_file(device, dtype, offload_root), profile.to_json())
    return profile


def kept_profile(device: Device, dtype: torch.dtype, offload_root: Path) -> Profile | None:
    """The kept profile of this machine, if there is a valid one. From now on its rates choose kernels."""
    try:
        kept = read_kept(_profile_file(device, dtype, offload_root), stamp(offload_root, device))
        profile = Profile.from_dict(kept or {})
    except UserError:
        return None
    if profile.kernels is not None:
        linear.use(profile.kernels)
    return profile


def _profile_file(device: Device, dtype: torch.dtype, offload_root: Path) -> Path:
    gpu = machine(device=device)["gpu"] if device.is_cuda else ""
    place = f"{mount_point(offload_root)}{gpu}"  # jobs may alternate between disks, and between kinds of GPUs
    return kept_file(f"{device.torch_device.type}-{dtype_name(dtype)}-{crc32(place.encode()):08x}")


@torch.inference_mode()
def measure(
    device: Device, dtype: torch.dtype, offload_root: Path, progress: bool = True, scale: Scale | None = None
) -> Profile:
    """Measure everything that a Profile holds. Raises UserError if the offload folder is not writable or lacks 0.3 GB,
    or the GPU has too little memory."""
    scale = scale or (CUDA if device.is_cuda else Scale())
    if device.is_cuda and not device.workspace_bytes:
        device.start(None)
    before = scheduled()
    baseline = memory.baseline()
    passes = []
    try:
        for _ in bar(range(scale.passes), "measuring this machine, once", unit="passes", show=progress):
            links = measure_links(device, dtype, offload_root, scale)
            passes.append(measure_compute(device, dtype, scale) | {"links": links})
    except torch.OutOfMemoryError:
        raise UserError(
            f"{device} has too little memory left to measure its rates: stop other programs that use it, raise a limit "
            "on its memory, or pass a hardware profile"
        ) from None
    ram = memory.ram_in_all()
    gpu = device.free_bytes() if device.is_cuda else ram
    profile = Profile(
        **stamp(offload_root, device),
        date=date.today().isoformat(),
        command="h2o-flexgen hardware",
        device=device.torch_device.type,
        dtype=dtype_name(dtype),
        memory={"gpu": gpu, "cpu": ram, "disk": memory.disk_free(offload_root)},
        **medians(passes),
        baseline_bytes=baseline,
        workspace_bytes=device.workspace_bytes,
        crowded=crowding(before, scheduled()),
        kernels=None if device.is_cuda or dtype == torch.float32 else linear.rates(),
    )
    profile = replace(profile, step_seconds=remainder(profile.step_seconds, known_seconds(profile)))
    if profile.crowded > CROWDED:
        log.warning(
            "other programs kept this one waiting for a CPU core %.0f%% of the time while the machine was measured: "
            "rates may be too low, and policies based on them poor; close those programs and measure again",
            100 * profile.crowded,
        )
    return profile


def medians(passes: list):
    """The median of numbers; for dicts or dataclasses of the same shape, one with the median of each number."""
    first = passes[0]
    if isinstance(first, dict):
        return {key: medians([*map(itemgetter(key), passes)]) for key in first}
    if is_dataclass(first):
        return type(first)(**medians([*map(vars, passes)]))
    return median(passes)


def this_machine(
    device_name: str,
    dtype: str,
    offload_dir: str | None,
    declared: str | None,
    compute: str = "exact",
    quantised: bool = False,
) -> Profile:
    """The profile of this machine, measured now if none is kept, with the memory that is free now; where there are
    several devices, that of each instead of the gpu tier's. `device_name`, `dtype`, `compute`: as for `LLM`;
    `declared`: the type of the weights; `quantised`: some of them are in 8 or 4 bits."""
    from transformers import AutoTokenizer  # noqa: F401  part of a job's baseline memory

    devices = [open_device(name.strip()) for name in device_name.split(",")]
    check_devices(devices)
    device = devices[0]
    root = Path(offload_dir) if offload_dir else default_root()
    for each in devices:
        each.start(None)
    job = job_dtype(device, dtype, declared, compute=compute)
    prepare_loops(job, quantised, compute)
    baseline = memory.baseline()
    profile = load_or_measure(device, job, root)
    ram = memory.ram_in_all()
    available = {"cpu": ram, "disk": memory.disk_free(root)}
    for name, each in zip(pool_names(devices), devices):
        available[name] = each.free_bytes() + each.workspace_bytes if each.is_cuda else ram
    workspace = max(each.workspace_bytes for each in devices)
    return replace(profile, memory=available, baseline_bytes=baseline, workspace_bytes=workspace)
