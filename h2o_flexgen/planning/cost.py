"""How long a block takes under a policy, on hardware as profiled. Pure Python.

The model follows the engine: per layer, compute and the transfer queues run beside each other, and the slowest decides
(FlexGen, arXiv 2303.06865, section 4.3, with this engine's queues). Every quantity is linear in what is on each tier,
so the same functions cost a placement and write down the linear program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import ceil, prod
from typing import NamedTuple

from h2o_flexgen.planning.memory import Shapes
from h2o_flexgen.planning.placement import Placement
from h2o_flexgen.planning.profile import Profile
from h2o_flexgen.planning.traffic import RESIDENT, Flows, Offloaded, Traffic, busy_seconds, weights_beside
from h2o_flexgen.policy import Policy
from h2o_flexgen.sizes import (
    HEAD_ROWS,
    Workload,
    batch_sizes,
    full_segments,
    kv_buffers,
    matmul_rows,
    prefill_pairs,
    requests,
    wal_rows,
)

#: the batches of a block: sequences, and tokens of the longest prompt
Batches = Sequence[tuple[int, int]]
#: blocks of a job that are costed at most
_MOST_BLOCKS = 32
#: a decoder layer, which stands for all, and the head, among the layers
_DECODER, _HEAD = 1, -1


class Compute(NamedTuple):
    """Seconds of compute: `resident` with all weights on the device, and `streaming` more with all of them streamed."""

    resident: float = 0.0
    streaming: float = 0.0

    def seconds(self, streamed: float) -> float:
        """With this part of the weights, in [0, 1], streamed; it may be an expression of a linear program."""
        return self.resident + self.streaming * streamed if self.streaming else self.resident


def _total(work: Iterable[Compute]) -> Compute:
    resident, streaming = zip(*work)
    return Compute(sum(resident), sum(streaming))


class CacheState(NamedTuple):
    """The cache of a sequence during `steps` decode steps.

    Attributes:
        slots: in use.
        stored, wal_rows: slots and write-ahead log rows that are read of a KV block on disk.
        compactions, compacted: how often a step compacts the log, and the slots that this writes.
    """

    steps: int
    slots: int
    stored: int
    wal_rows: float
    compactions: float
    compacted: int


@dataclass
class Prediction:
    """What a policy costs.

    Attributes:
        prefill_seconds, decode_seconds: of the first, full block.
        job_prefill_seconds, job_decode_seconds: of all blocks.
        terms: per phase ("prefill", "decode") the seconds of the first block that each resource is busy.
    """

    prefill_seconds: float
    decode_seconds: float
    job_prefill_seconds: float
    job_decode_seconds: float
    block_size: int
    gen_len: int
    num_prompts: int
    terms: dict[str, dict[str, float]]

    @property
    def block_seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def job_seconds(self) -> float:
        return self.job_prefill_seconds + self.job_decode_seconds

    @property
    def block_tokens_per_s(self) -> float:
        return self.block_size * self.gen_len / self.block_seconds

    @property
    def tokens_per_s(self) -> float:
        """Of the whole job."""
        return self.num_prompts * self.gen_len / self.job_seconds

    def of_job(self) -> dict[str, float | str]:
        """For a report, as plain data."""
        return {
            "prefill_seconds": self.job_prefill_seconds,
            "decode_seconds": self.job_decode_seconds,
            "tokens_per_s": self.tokens_per_s,
            "bound_by": self.bound_by,
        }

    @property
    def bound_by(self) -> str:
        """The resource that is busy longest; where resources take turns, the one with the largest part."""
        name, seconds = self.busy[0]
        parts = [(n, s) for n, s in self.busy if n in ("compute", "disk", "cpu to gpu", "gpu to cpu")]
        if name == "compute and what copies take from it" and dict(parts)["compute"] >= seconds / 2:
            return "compute"
        return parts[0][0] if name.startswith(("compute and", "all in turn")) else name

    @property
    def busy(self) -> list[tuple[str, float]]:
        """[(resource, seconds)] of the longer phase, the busiest first."""
        phase = "decode" if self.decode_seconds >= self.prefill_seconds else "prefill"
        return sorted(self.terms[phase].items(), key=lambda item: -item[1])


class CostModel:
    """Costs policies for one model, job and machine.

    Attributes:
        layer_bytes, head_bytes, decoder_bytes, streamed_bytes: weights of one decoder layer, of the head, of all
            decoder layers, and of everything that a step needs whole, in the type of the computation.
    """

    def __init__(self, profile: Profile, shapes: Shapes, workload: Workload):
        self.profile, self.shapes, self.workload = profile, shapes, workload
        self.hidden_bytes = shapes.spec.hidden * shapes.itemsize
        self._matrices = [{n: s for n, s in layer.items() if len(s) > 1} for layer in shapes.streamed]
        sizes = [shapes.itemsize * sum(map(prod, layer.values())) for layer in self._matrices]
        self.layer_bytes, self.head_bytes = sizes[1], sizes[-1]
        self.decoder_bytes, self.streamed_bytes = sum(sizes[1:-1]), sum(sizes)
        # a table whose rows are looked up is not packed
        self._gathered = {name for layer in shapes.layers for name, _ in layer.gathered.values()}
        # as beside a cache from disk; without one the requests are larger (offload/disk.py), which saves little
        count = sum(requests(prod(s) * shapes.stored_itemsize) for s in self._matrices[1].values())
        self._requests_per_byte = count / self.layer_bytes
        for name in ("_matmuls", "_decode_matmuls", "_prefill_batch"):
            setattr(self, name, lru_cache(maxsize=None)(getattr(self, name)))

    # compute

    def _matmuls(self, layer: int, rows: int) -> Compute:
        """Of `rows` rows with the matrices of a layer."""
        seconds, matrices = self.profile.matmul_seconds, self._matrices[layer].items()
        streamed = sum(seconds(shape, rows) for _, shape in matrices)
        resident = sum(seconds(shape, rows, resident=name not in self._gathered) for name, shape in matrices)
        return Compute(resident, max(0.0, streamed - resident))

    def _decode_matmuls(self, sizes: tuple[int, ...]) -> Compute:
        """A decode step of batches through a decoder layer, without attention."""
        dispatch = Compute(len(sizes) * self.profile.step_seconds)
        return _total([dispatch, *(self._matmuls(_DECODER, rows) for rows in matmul_rows(sizes))])

    def _attention(self, phase: str, work: float) -> float:
        """Seconds of one sequence in one layer."""
        spec = self.shapes.spec
        heads, group = (spec.heads, 1) if phase == "prefill" else (spec.kv_heads, spec.groups)
        return self.profile.attention[phase][self.shapes.rule.name].seconds(work, heads, spec.head_dim, group)

    def _prefill_batch(self, batch: int, length: int, prefill_tokens: int) -> Compute:
        """Prompts of `length` tokens in micro-batches through a decoder layer, with attention."""
        sizes = _cut(batch, min(batch, max(1, prefill_tokens // length)))
        flops = 4 * self.shapes.spec.query_width * prefill_pairs(length)
        rest = batch * self._attention("prefill", flops) + len(sizes) * self.profile.step_seconds
        return _total([Compute(rest), *(self._matmuls(_DECODER, n * length) for n in sizes)])

    def _head(self, batch: int) -> Compute:
        return _total(self._matmuls(_HEAD, rows) for rows in _cut(batch, HEAD_ROWS))

    def head_compute(self, sizes: Sequence[int], streamed: float = 0.0) -> tuple[float, float]:
        """From the last hidden states of batches to tokens, in prefill and in a decode step; `streamed`: the part of
        the head's weights that is not resident."""
        return tuple(_total(map(self._head, rows)).seconds(streamed) for rows in (sizes, matmul_rows(sizes)))

    def prefill_compute(self, policy: Policy, batches: Batches, streamed: float = 0.0) -> float:
        """One decoder layer, all batches; `streamed`: the part of its weights that is not resident."""
        work = (self._prefill_batch(size, length, policy.prefill_tokens) for size, length in batches)
        return _total(work).seconds(streamed)

    def decode_compute(
        self, policy: Policy, batches: Batches, slots: int, cache: Offloaded, layers: int = 1, streamed: float = 0.0
    ) -> float:
        """A step of `layers` decoder layers, all batches; `cache`: sequences times layers whose cache is offloaded."""
        sizes = tuple(size for size, _ in batches)
        matmuls = layers * self._decode_matmuls(sizes).seconds(streamed)
        nbytes = slots * self.shapes.kv.row_bytes
        each, sequences = self._attention("decode", nbytes), layers * sum(sizes)
        if not self._attends_on_cpu(policy):
            return matmuls + sequences * each
        return matmuls + (sequences - cache.cpu) * each + cache.cpu * self._attention("cpu", nbytes)

    def _attends_on_cpu(self, policy: Policy) -> bool:
        return policy.cpu_cache_compute and self.shapes.cuda and "cpu" in self.profile.attention

    def conversion(self, weights: Offloaded) -> float:
        """Seconds in which compute converts the weights that come from disk, about as fast as a copy in RAM."""
        per_byte = 1 / self.profile.links["cpu_to_gpu"].bytes_per_s
        return per_byte * weights.disk if self.shapes.converts_by_compute else 0.0

    # traffic

    def _weights(self, weights: Offloaded) -> tuple[Traffic, Traffic]:
        """From the cpu tier and from disk; `weights`: bytes in the type of the computation."""
        return Traffic(cpu_to_gpu=weights.cpu), Traffic(
            disk_to_cpu=self.shapes.stored_ratio * weights.disk,
            cpu_to_gpu=weights.disk if self.shapes.cuda else 0.0,
            reads=weights.disk * self._requests_per_byte,
        )

    def _requests(self, policy: Policy, data: Offloaded, nbytes: float) -> float:
        """Disk requests, one batch after the other, for `nbytes` of each sequence on disk."""
        batch = policy.gpu_batch_size
        return data.disk * (requests(ceil(batch * nbytes)) / batch)

    def prefill_flows(
        self,
        policy: Policy,
        compute: float,
        length: int,
        weights: Offloaded,
        cache: Offloaded = RESIDENT,
        activations: Offloaded = RESIDENT,
    ) -> Flows:
        """`length`: of the longest prompt; `weights`: those that are fetched meanwhile."""
        shapes = self.shapes
        crosses = 1 if shapes.cuda else 0  # whether disk data passes between the CPU and the GPU
        kept = shapes.kv.slots if shapes.rule.growth == "fixed" else min(length, shapes.kv.slots)
        kv = kept * shapes.kv.row_bytes
        hidden = length * self.hidden_bytes
        hidden_copied = hidden * (activations.cpu + crosses * activations.disk)
        hidden_requests = self._requests(policy, activations, hidden)
        write_back = Traffic(
            cpu_to_disk=cache.disk * kv + hidden * activations.disk,
            gpu_to_cpu=(cache.cpu + crosses * cache.disk) * kv
            + crosses * (cache.cpu + cache.disk) * shapes.kv.meta_bytes
            + hidden_copied,
            writes=self._requests(policy, cache, kv) + hidden_requests,
        )
        activations_in = Traffic(disk_to_cpu=hidden * activations.disk, cpu_to_gpu=hidden_copied, reads=hidden_requests)
        return Flows(compute, *self._weights(weights), activations_in, write_back)

    def decode_flows(
        self, policy: Policy, compute: float, state: CacheState, weights: Offloaded, cache: Offloaded = RESIDENT
    ) -> Flows:
        """The cache is read, one token is written back, and now and then a KV block on disk is compacted."""
        shapes, row = self.shapes, self.shapes.kv.row_bytes
        crosses = 1 if shapes.cuda else 0
        meta = crosses * shapes.kv.meta_bytes  # in RAM, scores are used in place
        kv, stored, wal = state.slots * row, state.stored * row, state.wal_rows * row
        moved = 0 if policy.cpu_cache_compute else cache.cpu  # a cache that the CPU attends to stays in place
        compacted = cache.disk * (state.compactions * state.compacted * row)
        reads = [stored + wal] if shapes.rule.growth == "fixed" else [stored, wal]
        cache_in = Traffic(
            disk_to_cpu=cache.disk * (stored + wal),
            cpu_to_gpu=moved * (kv + meta) + cache.disk * (meta + (kv if crosses else wal + kv - stored)),
            reads=sum(self._requests(policy, cache, nbytes) for nbytes in reads),
        )
        write_back = Traffic(
            cpu_to_disk=cache.disk * row + compacted,
            gpu_to_cpu=moved * (row + meta) + cache.disk * (row + meta) + crosses * compacted,
            writes=self._requests(policy, cache, row)
            + state.compactions * self._requests(policy, cache, state.compacted * row),
        )
        if self._attends_on_cpu(policy):  # queries, keys and values to the CPU, and the context back
            cache_in += Traffic(cpu_to_gpu=cache.cpu * self.hidden_bytes)
            write_back += Traffic(gpu_to_cpu=cache.cpu * 3 * self.hidden_bytes)
        return Flows(compute, *self._weights(weights), write_back=write_back, cache_in=cache_in)

    def seconds(self, flows: Flows, overlap: bool) -> dict[str, float]:
        """What the flows take, by resource."""
        return busy_seconds(self.profile.links, flows, overlap)

    # a block

    def cache_states(self, length: int) -> list[CacheState]:
        """Of a block whose longest prompt has `length` tokens, for every kind of decode step."""
        gen_len, slots, rows = self.workload.gen_len, self.shapes.kv.slots, wal_rows(self.shapes.segments)
        steps = gen_len - 1
        if steps == 0:
            return []
        if self.shapes.rule.growth == "fixed":  # compacted when the log is full
            mean = sum(i % (rows + 1) for i in range(steps)) / steps
            return [CacheState(steps, slots, slots, mean, steps // (rows + 1) / steps, slots)]
        states, end, segments = [], length, full_segments(length, gen_len)[1:]
        for n, segment in enumerate(segments, 1):  # each is a log until it is full
            compactions = (n < len(segments)) / segment
            states.append(CacheState(segment, end + segment, end, (segment - 1) / 2, compactions, segment))
            end += segment
        return states

    def batches(self, policy: Policy, begin: int) -> Batches:
        """Of the block that begins with prompt `begin`."""
        lens = self.workload.prompt_lens
        sizes = batch_sizes(len(lens) - begin, policy)
        starts = [begin, *(begin + n for n in accumulate(sizes))]
        return tuple((size, lens[start]) for size, start in zip(sizes, starts))

    def predict(self, policy: Policy, placement: Placement) -> Prediction:
        """The time of the first block and of the job."""
        N, size = len(self.workload.prompt_lens), policy.block_size
        weights = [
            _offloaded((placement.weights[name], prod(shape) * self.shapes.itemsize) for name, shape in layer.items())
            for layer in self._matrices
        ]
        known = {}

        def block(start: int) -> tuple[float, float, dict]:
            batches = self.batches(policy, start)
            if batches not in known:
                known[batches] = self._block(policy, placement, weights, batches)
            return known[batches]

        full = range(0, N - N % size, size)
        # of many blocks, evenly spaced ones stand for all
        sample = full[(len(full) - 1) // _MOST_BLOCKS // 2 :: -(-len(full) // _MOST_BLOCKS) or 1]
        blocks = [(start, len(full) / len(sample)) for start in sample] + ([(len(full) * size, 1)] if N % size else [])
        prefill, decode = (sum(times * block(start)[phase] for start, times in blocks) for phase in (0, 1))
        first = block(0)
        return Prediction(first[0], first[1], prefill, decode, min(N, size), self.workload.gen_len, N, first[2])

    def _block(
        self, policy: Policy, placement: Placement, weights: list[Offloaded], batches: Batches
    ) -> tuple[float, float, dict]:
        """Seconds of prefill and decode, and the terms; `weights`: of each layer."""
        sizes, length = tuple(size for size, _ in batches), batches[0][1]
        activations = _offloaded(zip(placement.activations, sizes))
        terms = {"prefill": Counter(), "decode": Counter()}

        def spend(phase: str, times: int, flows: Flows, behind_matmuls: float = 0.0, matmuls: float = 0.0) -> float:
            seconds = self.seconds(flows, policy.overlap)
            if behind_matmuls > 0 and policy.overlap:
                cache_in = max(seconds["cache from disk"], seconds["cache to gpu"])
                seconds["cache behind matmuls"] = matmuls + behind_matmuls * cache_in
            for name, value in seconds.items():
                terms[phase][name] += times * value
            return times * max(seconds.values())

        fetched = weights_beside(weights)
        cache = [
            _offloaded((placement.cache[layer, k], size) for k, size in enumerate(sizes))
            for layer in range(self.shapes.spec.layers)
        ]
        # layers that are alike are costed once: (weights, weights fetched meanwhile, cache) -> how many
        alike = Counter(zip(weights[1:-1], fetched[1:-1], cache))
        embedding, head = self.conversion(weights[0]), self.conversion(weights[-1])
        heads = self.head_compute(sizes, sum(weights[-1]) / self.head_bytes)
        prefill_ends, decode_ends = (((embedding, fetched[0]), (head + logits, fetched[-1])) for logits in heads)
        prefill = decode = 0.0
        for (w, next_w, c), n in alike.items():
            compute = self.prefill_compute(policy, batches, sum(w) / self.layer_bytes) + self.conversion(w)
            prefill += spend("prefill", n, self.prefill_flows(policy, compute, length, next_w, c, activations))
        for compute, next_w in prefill_ends:
            prefill += spend("prefill", 1, self.prefill_flows(policy, compute, length, next_w))
        if policy.overlap:  # nothing runs beside the first weights
            first = next((w for w in weights if any(w)), RESIDENT)
            prefill += max(self.seconds(Flows(0.0, *self._weights(first)), True).values())
        matmuls, groups = self._decode_matmuls(sizes), len(matmul_rows(sizes))
        for state in self.cache_states(length):
            for (w, next_w, c), n in alike.items():
                part = sum(w) / self.layer_bytes
                compute = self.decode_compute(policy, batches, state.slots, c, 1, part) + self.conversion(w)
                flows = self.decode_flows(policy, compute, state, next_w, c)
                behind = self._behind_matmuls(policy, groups, c)
                decode += spend("decode", state.steps * n, flows, behind, matmuls.seconds(part))
            for compute, next_w in decode_ends:
                decode += spend("decode", state.steps, self.decode_flows(policy, compute, state, next_w))
        return prefill, decode, terms

    def _behind_matmuls(self, policy: Policy, groups: int, cache: Offloaded) -> float:
        """The part of a layer's cache that cannot be loaded during the matmuls of `groups` of batches: staging buffers
        are freed by attention."""
        blocks = (cache.disk + (0 if policy.cpu_cache_compute else cache.cpu)) / policy.gpu_batch_size
        return 1 - kv_buffers(True, cache.disk > 0) * groups / blocks if blocks else 0.0


def _offloaded(sizes: Iterable[tuple[str, int]]) -> Offloaded:
    """`sizes`: (tier, bytes or sequences)."""
    sums = {"gpu": 0, "cpu": 0, "disk": 0}
    for tier, size in sizes:
        sums[tier] += size
    return Offloaded(sums["cpu"], sums["disk"])


def _cut(total: int, most: int) -> list[int]:
    """`total` rows in parts of `most`."""
    return [most] * (total // most) + [total % most] * (total % most > 0)
