"""Measure this machine for the policy search, with the engine's own functions, in under a minute."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from zlib import crc32

import torch
from tqdm import tqdm

from h2o_flexgen.errors import UserError
from h2o_flexgen.kernels.linear import dtype_name, rates, use
from h2o_flexgen.offload import memory
from h2o_flexgen.offload.device import Device
from h2o_flexgen.planning.profile import ATTENTION, LINKS, Link, Profile
from h2o_flexgen.profiling.compute import HEAD_DIMS, LAYER_MATMULS, PHASES, Attention, cases, fitting_shapes
from h2o_flexgen.profiling.links import links, visit_attention
from h2o_flexgen.profiling.machine import crowding, here, keep, kept_file, mount_point, read_kept, scheduled
from h2o_flexgen.profiling.scale import Scale, scale_for
from h2o_flexgen.sizes import requests

log = logging.getLogger(__name__)


def load_or_measure(
    device: Device, dtype: torch.dtype, offload_root: Path, progress: bool = True, scale: Scale | None = None
) -> Profile:
    """The profile of this machine: what was measured before if machine and versions are the same, else anew. Rates
    measured beside programs that kept the CPU busy are not kept."""
    scale = scale or scale_for(device)
    disk = crc32(mount_point(offload_root).encode())  # jobs may take turns on several
    path = kept_file(f"{device.torch_device.type}-{dtype_name(dtype)}-{disk:08x}")
    try:
        profile = Profile.from_dict(read_kept(path, here(offload_root, device)) or {})
        # when it was measured, memory may have been short
        if profile.matmul["streamed"].keys() >= set(fitting_shapes(device, dtype, scale)):
            if profile.kernels is not None:
                use(profile.kernels)
            return profile
    except UserError:
        pass
    profile = measure(device, dtype, offload_root, progress, scale)
    if not profile.is_crowded:
        keep(path, profile.to_json())
    return profile


@torch.inference_mode()
def measure(
    device: Device, dtype: torch.dtype, offload_root: Path, progress: bool = True, scale: Scale | None = None
) -> Profile:
    """Measure everything that a Profile holds.

    Raises:
        UserError: the offload folder cannot be written, or has no space for half a GiB; the GPU has too little memory.
    """
    scale = scale or scale_for(device)
    if device.is_cuda and not device.workspace_bytes:
        device.start(None)
    before, baseline = scheduled(), memory.baseline()
    try:
        found = Measured(_seconds(device, dtype, offload_root, progress, scale), dtype, scale)
    except torch.OutOfMemoryError:
        raise UserError(
            f"{device} has too little memory left to measure its rates: end what else uses it; a job may need a higher "
            "limit of device memory, or a hardware profile that is given"
        ) from None
    attention, head_seconds = found.attention()
    ram = memory.ram_in_all()
    gpu = device.free_bytes() if device.is_cuda else ram
    profile = Profile(
        **here(offload_root, device),
        date=date.today().isoformat(),
        command="python -m h2o_flexgen.hardware",
        device=device.torch_device.type,
        dtype=dtype_name(dtype),
        memory={"gpu": gpu, "cpu": ram, "disk": memory.disk_free(offload_root)},
        links={name: found.link(name) for name in LINKS},
        matmul=found.matmul(),
        prefill_attention=attention["prefill"],
        decode_attention=attention["decode"],
        cpu_attention=attention.get("cpu"),
        head_seconds=head_seconds,
        grouped=found.grouped(),
        visit_seconds=found.visit_seconds(),
        step_seconds=found("step") + max(found("small", rule) for rule in ATTENTION),
        logit_seconds=found("choose") / (scale.logits[0] * scale.logits[1]),
        convert_seconds_per_byte=found("convert") / scale.transfer_bytes,
        baseline_bytes=baseline,
        workspace_bytes=device.workspace_bytes,
        crowded=crowding(before, scheduled()),
        kernels=None if device.is_cuda or dtype == torch.float32 else rates(),
    )
    if profile.is_crowded:
        log.warning(
            "other programs kept this one waiting for a CPU core %.0f%% of the time while the machine was measured: "
            "its rates may be too low, and a policy by them poor; close them and run the command again",
            100 * profile.crowded,
        )
    return profile


def _seconds(
    device: Device, dtype: torch.dtype, offload_root: Path, progress: bool, scale: Scale
) -> dict[tuple, float]:
    """Median seconds by the keys of `compute.cases` and `links.links`."""
    samples = defaultdict(list)
    steps = scale.passes * (len(list(cases(device, dtype, scale))) + len(LINKS))
    with tqdm(total=steps, desc="measuring this machine", unit="step", disable=not progress, leave=False) as bar:
        for _ in range(scale.passes):
            for case in cases(device, dtype, scale):
                samples[case.key].append(case.seconds(scale))
                bar.update()
            for key, seconds in links(device, dtype, offload_root, scale):
                samples[key].append(seconds)
                bar.update(key[:2] == ("alone", "large"))
    return {key: median(values) for key, values in samples.items()}


@dataclass(frozen=True)
class Measured:
    """Seconds of everything that was timed, by the keys of `compute.cases` and `links.links`, and what follows."""

    seconds: dict[tuple, float]
    dtype: torch.dtype
    scale: Scale

    def __call__(self, *key) -> float:
        return self.seconds[key]

    def matmul(self) -> dict[str, dict[tuple[int, int], list[tuple[int, float]]]]:
        """Rates without what a matmul takes whatever its size, which counts as part of a step."""
        each, found = self("step") / LAYER_MATMULS, defaultdict(lambda: defaultdict(list))
        for _, kind, (out, width), rows in (key for key in self.seconds if key[0] == "matmul"):
            seconds = beyond(self("matmul", kind, (out, width), rows), each)
            found[kind][out, width].append((rows, 2 * out * width * rows / seconds))
        return {kind: dict(found.get(kind, found["streamed"])) for kind in ("streamed", "resident")}

    def link(self, name: str) -> Link:
        alone, beside, lost = (self(what, "large", name) for what in ("alone", "beside", "lost"))
        slowed = max(0.0, 1 - alone / beside)
        return Link(1 / alone, lost, slowed, self._each_request("alone", name), self._each_request("lost", name))

    def _each_request(self, what: str, name: str) -> float:
        """The part of a small transfer that its bytes do not explain, for each of its requests."""
        if name not in self.scale.small_bytes:
            return 0.0
        size = self.scale.small_bytes[name]
        return max(0.0, self(what, "small", name) - self(what, "large", name) * size) / requests(size)

    def visit_seconds(self) -> float:
        """What a visit takes from compute besides its bytes and its requests: one reads the KV block, one its log, one
        writes the new row."""
        layout = visit_attention(self.scale).layout(self.dtype)
        known = layout.kv_bytes * self("lost", "large", "disk_to_cpu")
        known += layout.row_bytes * self("lost", "large", "cpu_to_disk")
        known += 2 * self._each_request("lost", "disk_to_cpu") + self._each_request("lost", "cpu_to_disk")
        return max(0.0, self("visit") - known)

    def attention(self) -> tuple[dict, dict]:
        """Per phase and rule: flops or bytes per second by head size, and the seconds that a head takes whatever its
        length."""
        found, constants = defaultdict(dict), defaultdict(dict)
        for phase, rule in sorted({key[:2] for key in self.seconds if key[0] in PHASES}):
            each, work = {}, {}  # of one head: seconds, and flops or bytes
            for size in (*HEAD_DIMS, "short"):
                case = Attention.of(phase, rule, size, self.scale)
                each[size] = beyond(self(phase, rule, size), self("small", rule)) / (case.batch * case.heads)
                work[size] = case.work(phase, self.dtype)
            first = HEAD_DIMS[0]
            slope = beyond(each[first], each["short"]) / (work[first] - work["short"])
            constant = constants[phase][rule] = max(0.0, each["short"] - slope * work["short"])
            found[phase][rule] = {dim: work[dim] / beyond(each[dim], constant) for dim in HEAD_DIMS}
        return dict(found), dict(constants)

    def grouped(self) -> dict[str, dict[str, float]]:
        """Per phase and rule: seconds of grouped heads over those of heads with a query each."""
        found = defaultdict(dict)
        for phase, rule, _ in (key for key in self.seconds if key[-1] == "grouped"):
            found[phase][rule] = self(phase, rule, "grouped") / self(phase, rule, HEAD_DIMS[0])
        return dict(found)


def beyond(taken: float, known: float) -> float:
    """A time without a part of it that is known; noise must not make it vanish."""
    return max(taken - known, taken / 4)
