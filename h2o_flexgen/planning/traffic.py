"""Bytes that move between the tiers, and the seconds that this takes beside compute.

An `Amount` is a number, a numpy array with an entry for each of several placements, or an expression of a linear
program. So formulas here and in `layer_cost` only add amounts up and multiply them by numbers.
"""

from __future__ import annotations

from operator import add
from typing import Any, NamedTuple, TypeAlias

from h2o_flexgen.machine.profile import LINKS, Link

Amount: TypeAlias = Any


class Offloaded(NamedTuple):
    """What is on the host and disk tiers: bytes of weights, or sequences times layers."""

    cpu: Amount = 0.0
    disk: Amount = 0.0

    def __add__(self, other: Offloaded) -> Offloaded:
        return Offloaded(self.cpu + other.cpu, self.disk + other.disk)


class LinkSeconds(NamedTuple):
    """Seconds of disk reads and writes, and of copies to and from the GPU."""

    read: Amount
    write: Amount
    to_gpu: Amount
    from_gpu: Amount


class Traffic(NamedTuple):
    """Bytes on each of LINKS, and the number of disk requests that are smaller than those for weights."""

    disk_to_cpu: Amount = 0.0
    cpu_to_disk: Amount = 0.0
    cpu_to_gpu: Amount = 0.0
    gpu_to_cpu: Amount = 0.0
    reads: Amount = 0.0
    writes: Amount = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(add, self, other))

    def __rmul__(self, times: float) -> Traffic:
        return Traffic(*(times * amount for amount in self))

    def seconds(self, links: dict[str, Link]) -> LinkSeconds:
        """Seconds of each link if nothing else runs."""
        from_disk = links["disk_to_cpu"]
        to_disk = links["cpu_to_disk"]
        return LinkSeconds(
            self.disk_to_cpu * (1 / from_disk.bytes_per_s) + self.reads * from_disk.request_seconds,
            self.cpu_to_disk * (1 / to_disk.bytes_per_s) + self.writes * to_disk.request_seconds,
            self.cpu_to_gpu * (1 / links["cpu_to_gpu"].bytes_per_s),
            self.gpu_to_cpu * (1 / links["gpu_to_cpu"].bytes_per_s),
        )

    def compute_seconds(self, links: dict[str, Link]) -> Amount:
        """Seconds that the traffic takes from compute beside it."""
        seconds = sum(nbytes * links[name].compute_seconds_per_byte for name, nbytes in zip(LINKS, self))
        seconds += self.reads * links["disk_to_cpu"].compute_seconds_per_request
        return seconds + self.writes * links["cpu_to_disk"].compute_seconds_per_request


class Flows(NamedTuple):
    """What runs at the same time in one or several layers: compute, and the bytes of the transfer queues.

    Attributes:
        compute: seconds.
        matmuls: seconds of `compute` during which no staging buffer for KV blocks becomes free.
        cache_beside_matmuls: the most of `cache_in` that finds a free staging buffer during `matmuls`.
    """

    compute: Amount
    weights: Traffic = Traffic()
    activations_in: Traffic = Traffic()
    cache_in: Traffic = Traffic()
    write_back: Traffic = Traffic()
    matmuls: Amount = 0.0
    cache_beside_matmuls: Traffic = Traffic()

    @property
    def total(self) -> Traffic:
        return self.weights + self.activations_in + self.cache_in + self.write_back

    def busy(self, links: dict[str, Link]) -> dict[str, Amount]:
        """Seconds for which each resource is busy."""
        link = self.total.seconds(links)
        disk = link.read + link.write
        return {"compute": self.compute, "disk": disk, "cpu to gpu": link.to_gpu, "gpu to cpu": link.from_gpu}

    def bounds(self, links: dict[str, Link], overlap: bool) -> list[Amount]:
        """Lower bounds of the seconds, one per bottleneck; the largest is the prediction."""
        if not overlap:
            return [sum(self.busy(links).values())]
        link = self.total.seconds(links)
        # what a link that compute slows down still has to do afterwards
        left = {name: each.slowed_by_compute * self.compute for name, each in links.items()}
        cache = self.cache_in.seconds(links)
        early = self.cache_beside_matmuls.seconds(links)
        return [
            self.compute + self.total.compute_seconds(links),
            link.read + link.write + left["disk_to_cpu"],
            link.write + left["cpu_to_disk"],
            link.to_gpu + left["cpu_to_gpu"],
            link.from_gpu + left["gpu_to_cpu"],
            # each of these queues alternates between the disk and copies
            sum(self.activations_in.seconds(links)),
            sum(self.write_back.seconds(links)),
            # the cache is read from disk while it is copied
            self.matmuls + cache.read - early.read,
            self.matmuls + cache.to_gpu - early.to_gpu,
        ]


def weights_beside(weights: list[Offloaded]) -> list[Offloaded]:
    """The weights that are fetched while each layer computes: a group of layers, which shares a staging buffer as in
    `storage.weights`, is fetched evenly from the first layer of the group before on. `weights`: of each layer."""
    groups: dict[int, Offloaded] = {}  # by the first layer
    room = max(map(sum, weights))
    first = 0
    for n, layer in enumerate(weights):
        if any(layer):
            if not groups or sum(groups[first]) + sum(layer) > room:
                first = n
                groups[first] = Offloaded()
            groups[first] += layer
    fetched = [Offloaded()] * len(weights)
    begin = first - len(weights)  # negative: while the last group computes, the first is fetched
    for first, group in groups.items():
        each = Offloaded(group.cpu / (first - begin), group.disk / (first - begin))
        for n in range(begin, first):
            fetched[n] = each
        begin = first
    return fetched
