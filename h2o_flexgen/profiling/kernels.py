"""Which kernels are fastest on this CPU: measured once, and kept beside the hardware profiles."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch

from h2o_flexgen.kernels import linear
from h2o_flexgen.kernels.linear import KernelRates
from h2o_flexgen.offload.device import Device
from h2o_flexgen.planning.profile import CROWDED
from h2o_flexgen.profiling import machine
from h2o_flexgen.profiling.machine import crowding, keep, kept_file, read_kept, scheduled


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
    path, here = kept_file("kernels"), machine.here()
    try:
        return KernelRates.from_dict(read_kept(path, here)["rates"])
    except (KeyError, TypeError, ValueError, AttributeError):  # there is none, or it is damaged
        pass
    before = scheduled()
    rates = linear.measure()
    if crowding(before, scheduled()) <= CROWDED:
        keep(path, json.dumps({**here, "rates": asdict(rates)}, indent=1))
    return rates
