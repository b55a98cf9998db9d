"""Bytes on the way between the tiers, and how long they take beside compute."""

from __future__ import annotations

from typing import NamedTuple

from h2o_flexgen.planning.profile import LINKS, Link


class Offloaded(NamedTuple):
    """What is on the cpu and disk tiers: bytes of weights, or sequences times layers. Numbers, or expressions of a
    linear program."""

    cpu: float = 0.0
    disk: float = 0.0


#: everything is resident
RESIDENT = Offloaded()


class Traffic(NamedTuple):
    """Bytes on each link, moved one after the other, and the number of disk requests."""

    disk_to_cpu: float = 0.0
    cpu_to_disk: float = 0.0
    cpu_to_gpu: float = 0.0
    gpu_to_cpu: float = 0.0
    reads: float = 0.0
    writes: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(self, other)))


class Flows(NamedTuple):
    """What runs at the same time in one or several layers: seconds of compute, and the bytes of each transfer queue."""

    compute: float
    weights_from_cpu: Traffic
    weights_from_disk: Traffic
    activations_in: Traffic = Traffic()
    write_back: Traffic = Traffic()
    cache_in: Traffic = Traffic()  # its reads from disk and its copies to the GPU overlap


def busy_seconds(links: dict[str, Link], flows: Flows, overlap: bool) -> dict[str, float]:
    """What the flows take, by resource: the largest of these is the time, with overlap or without."""

    def busy(x: Traffic) -> tuple:
        """Seconds of reads, of writes, and of copies to and from the GPU."""
        read, write, to_gpu, from_gpu = (nbytes * (1 / links[name].bytes_per_s) for name, nbytes in zip(LINKS, x))
        read += x.reads * links["disk_to_cpu"].request_seconds
        return read, write + x.writes * links["cpu_to_disk"].request_seconds, to_gpu, from_gpu

    compute, total = flows.compute, sum(flows[1:], Traffic())
    read, write, to_gpu, from_gpu = busy(total)
    # reads of weights overlap with their copies to the GPU
    weights_read = busy(flows.weights_from_disk)[0]
    weights_copied = busy(flows.weights_from_cpu)[2] + busy(flows.weights_from_disk)[2]
    activations_in, write_back, cache_in = (busy(x) for x in flows[3:])
    if not overlap:
        rest = compute + sum(activations_in) + sum(write_back) + sum(cache_in)
        return {
            "all in turn (disk)": rest + weights_read,
            "all in turn": rest + weights_copied,
            "compute": compute,
            "disk": read + write,
            "cpu to gpu": to_gpu,
            "gpu to cpu": from_gpu,
        }
    # a link that is slower beside compute has this much left to do afterwards
    late = {name: link.slowed_by_compute * compute for name, link in links.items()}
    lost = sum(nbytes * links[name].compute_seconds_per_byte for name, nbytes in zip(LINKS, total))
    lost += total.reads * links["disk_to_cpu"].compute_seconds_per_request
    lost += total.writes * links["cpu_to_disk"].compute_seconds_per_request
    return {
        "compute": compute,
        "compute and what copies take from it": compute + lost,
        "disk": read + write + late["disk_to_cpu"],
        "disk writes": write + late["cpu_to_disk"],
        "cpu to gpu": to_gpu + late["cpu_to_gpu"],
        "gpu to cpu": from_gpu + late["gpu_to_cpu"],
        "weights from disk": weights_read + late["disk_to_cpu"],
        "weights": weights_copied + late["cpu_to_gpu"],
        "activations in": sum(activations_in),
        "cache from disk": cache_in[0],
        "cache to gpu": cache_in[2],
        "cache and activations out": sum(write_back),
    }


def weights_beside(weights: list[Offloaded]) -> list[Offloaded]:
    """The weights that are fetched while each layer computes: those of the next layer that streams. The engine begins
    with them at the layer that streamed before it. `weights`: of each layer."""
    fetched = [RESIDENT] * len(weights)
    begin = 0 if any(weights[0]) else 1  # an embedding that does not stream takes no time either
    turn = len(weights) - begin
    streams = [j for j, w in enumerate(weights) if any(w)]
    for before, j in zip([streams[-1] - turn, *streams] if streams else [], streams):
        for layer in range(before, j):
            fetched[layer if layer >= begin else layer + turn] = Offloaded(*(x / (j - before) for x in weights[j]))
    return fetched
