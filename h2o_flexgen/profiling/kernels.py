"""Which kernels are fastest on this CPU: measured once, and kept beside the hardware profiles."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict
from pathlib import Path

import torch

from h2o_flexgen.errors import UserError
from h2o_flexgen.files import read_json
from h2o_flexgen.kernels import linear
from h2o_flexgen.kernels.rates import KernelRates
from h2o_flexgen.offload.device import Device
from h2o_flexgen.offload.disk import cache_root
from h2o_flexgen.planning.profile import CROWDED
from h2o_flexgen.profiling.machine import Crowding, machine, versions

log = logging.getLogger(__name__)


def job_dtype(
    device: Device, name: str, stored: torch.dtype | None = None, kernels: KernelRates | None = None
) -> torch.dtype:
    """The dtype that a job computes in, as `Device.dtype` says, by kernels as they were measured on this machine.

    Args:
        kernels: measured ones, of a profile that is given.
    """
    if kernels is not None:
        linear.use(kernels)
    elif not device.is_cuda and name not in ("float32", "fp32") and not linear.are_known():
        linear.use(load_or_measure_kernels())
    return device.dtype(name, stored)


def load_or_measure_kernels() -> KernelRates:
    """What was measured before if machine and versions are the same, else anew. Rates beside programs that kept the
    CPU busy are not kept."""
    path = kept_kernels()
    here = {"machine": machine(), "versions": versions()}
    try:
        kept = read_json("the rates of kernels", path)
        if {name: kept.get(name) for name in here} == here:
            return KernelRates.from_dict(kept["rates"])
    except (UserError, KeyError, TypeError, ValueError, AttributeError):
        pass
    crowding = Crowding()
    rates = linear.measure()
    if crowding.share() <= CROWDED:
        keep(path, json.dumps({**here, "rates": asdict(rates)}, indent=1))
    return rates


def kept_kernels() -> Path:
    """The file of this machine's rates."""
    return cache_root() / "hardware" / "kernels.json"


def keep(path: Path, text: str) -> None:
    """Write the whole file or, if that fails, none, with a warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(text + "\n")
        os.replace(new, path)
    except OSError as e:
        log.warning("cannot keep what was measured in %s: %s", path, e.strerror)
