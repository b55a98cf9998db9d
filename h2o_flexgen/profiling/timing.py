"""Timing calls on a device, alone and beside transfers."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from h2o_flexgen.offload.device import Device, finish

#: a call that takes longer than this is timed once
LONG_SECONDS = 0.5
#: of calls that find other data in the caches, which takes long to arrange, and of others
MOST_COLD_CALLS, MOST_CALLS = 20, 100


def call_seconds(device: Device, work: Callable[[], object], least: float, cold_bytes: int = 0) -> float:
    """Median seconds of a call, over calls of at least `least` seconds in all, after one that does not count.

    Args:
        cold_bytes: so many are written before each call, which then finds nothing in the caches, as after the matmuls
            of a layer.
    """
    work()
    device.synchronize()
    times, other = [], device.buffer(cold_bytes)
    most = MOST_COLD_CALLS if cold_bytes else MOST_CALLS
    while (len(times) < 2 and sum(times) < LONG_SECONDS) or (len(times) < most and sum(times) < least):
        other.add_(1)
        device.synchronize()
        start = time.perf_counter()
        work()
        device.synchronize()
        times.append(time.perf_counter() - start)
    return median(times)


def calls_per_second(device: Device, work: Callable[[], object], ended: Callable[[], bool]) -> float:
    """Of calls one after the other, until `ended`."""
    done, start = 0, time.perf_counter()
    while not (done and ended()):
        work()
        finish(device.record())  # not the copies beside it
        done += 1
    return done / (time.perf_counter() - start)


def after(seconds: float) -> Callable[[], bool]:
    """A function that says whether so many seconds have passed since now."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end
