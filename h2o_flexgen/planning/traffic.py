"""Bytes on the way between the tiers, and how long they take beside compute."""

from __future__ import annotations

from typing import NamedTuple

from h2o_flexgen.machine.profile import LINKS, Link


class Offloaded(NamedTuple):
    """What is on the cpu and disk tiers: bytes of weights, or sequences times layers. Numbers, or expressions of a
    linear program."""

    cpu: float = 0.0
    disk: float = 0.0


class Traffic(NamedTuple):
    """Bytes on each of LINKS, and the number of disk requests that are smaller than those of the weights."""

    disk_to_cpu: float = 0.0
    cpu_to_disk: float = 0.0
    cpu_to_gpu: float = 0.0
    gpu_to_cpu: float = 0.0
    reads: float = 0.0
    writes: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(self, other)))

    def seconds(self, links: dict[str, Link]) -> tuple[float, float, float, float]:
        """Of reads and writes of the disk, and of copies to and from the GPU."""
        read, write, to_gpu, from_gpu = (nbytes * (1 / links[name].bytes_per_s) for name, nbytes in zip(LINKS, self))
        read += self.reads * links["disk_to_cpu"].request_seconds
        return read, write + self.writes * links["cpu_to_disk"].request_seconds, to_gpu, from_gpu

    def compute_seconds(self, links: dict[str, Link]) -> float:
        """What the traffic takes away from compute beside it."""
        seconds = sum(nbytes * links[name].compute_seconds_per_byte for name, nbytes in zip(LINKS, self))
        seconds += self.reads * links["disk_to_cpu"].compute_seconds_per_request
        return seconds + self.writes * links["cpu_to_disk"].compute_seconds_per_request


class Flows(NamedTuple):
    """What runs at the same time in one or several layers: compute, and the bytes of the transfer queues.

    Attributes:
        compute: seconds; matmuls: those of them in which no staging buffer for KV blocks is freed.
        cache_beside_matmuls: the most of `cache_in` that there are staging buffers for during these.
    """

    compute: float
    weights: Traffic = Traffic()
    activations_in: Traffic = Traffic()
    cache_in: Traffic = Traffic()
    write_back: Traffic = Traffic()
    matmuls: float = 0.0
    cache_beside_matmuls: Traffic = Traffic()

    @property
    def total(self) -> Traffic:
        return self.weights + self.activations_in + self.cache_in + self.write_back

    def busy(self, links: dict[str, Link]) -> dict[str, float]:
        """Seconds of each resource."""
        read, write, to_gpu, from_gpu = self.total.seconds(links)
        return {"compute": self.compute, "disk": read + write, "cpu to gpu": to_gpu, "gpu to cpu": from_gpu}

    def bounds(self, links: dict[str, Link], overlap: bool) -> list[float]:
        """Seconds that all this takes at least, for one reason each; it takes the largest of them."""
        if not overlap:
            return [sum(self.busy(links).values())]
        read, write, to_gpu, from_gpu = self.total.seconds(links)
        # a link that is slower beside compute has this much left to do afterwards
        left = {name: link.slowed_by_compute * self.compute for name, link in links.items()}
        cache = self.cache_in.seconds(links)
        early = self.cache_beside_matmuls.seconds(links)
        return [
            self.compute + self.total.compute_seconds(links),
            read + write + left["disk_to_cpu"],
            write + left["cpu_to_disk"],
            to_gpu + left["cpu_to_gpu"],
            from_gpu + left["gpu_to_cpu"],
            # each of these queues waits for the disk and for copies in turn
            sum(self.activations_in.seconds(links)),
            sum(self.write_back.seconds(links)),
            # disk reads and copies of the cache overlap
            self.matmuls + cache[0] - early[0],
            self.matmuls + cache[2] - early[2],
        ]


def weights_beside(weights: list[Offloaded]) -> list[Offloaded]:
    """The weights that are fetched while each layer computes: those of the next group of layers, which share a staging
    buffer as in `offload.weights`. The engine begins with them at the first layer of the group before. `weights`: of
    each layer."""
    groups: list[Offloaded] = []
    begins: list[int] = []
    room = max(map(sum, weights))
    for j, w in enumerate(weights):
        if any(w):
            if not groups or sum(groups[-1]) + sum(w) > room:
                groups.append(Offloaded())
                begins.append(j)
            groups[-1] = Offloaded(*map(sum, zip(groups[-1], w)))
    fetched = [Offloaded()] * len(weights)
    for before, j, group in zip([begins[-1] - len(weights), *begins] if begins else [], begins, groups):
        for layer in range(before, j):  # those below 0 are the last ones
            fetched[layer] = Offloaded(*(x / (j - before) for x in group))
    return fetched
