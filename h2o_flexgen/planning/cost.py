"""How long a block takes under a policy, on hardware as profiled. Pure Python.

The model follows the engine: per layer, compute and four kinds of traffic run beside each other, and the slowest of
them decides (FlexGen, arXiv 2303.06865, section 4.3, with this engine's lanes). Every quantity is linear in what lies
on each tier, so that the same functions cost a placement and write down the linear program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from math import ceil, prod
from typing import NamedTuple

from h2o_flexgen.planning.memory import Shapes
from h2o_flexgen.planning.placement import Placement
from h2o_flexgen.planning.profile import LINKS, Profile, Shape
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
)

#: the batches of a block: sequences, and tokens of the longest prompt
Batches = Sequence[tuple[int, int]]
#: blocks of a job that are costed at most
_MOST_BLOCKS = 32


class Away(NamedTuple):
    """How much of something is at home on the cpu and disk tiers: bytes of weights, or sequences times layers.
    Numbers, or expressions of a linear program."""

    cpu: float = 0.0
    disk: float = 0.0


class Compute(NamedTuple):
    """Seconds of compute: `resident` where all weights stay on the device, and `extra` where all are streamed."""

    resident: float = 0.0
    extra: float = 0.0

    def seconds(self, streamed: float) -> float:
        """With this part of the weights, in [0, 1], streamed; it may be an expression of a linear program."""
        return self.resident + self.extra * streamed if self.extra else self.resident


def add_up(work: Iterable[Compute]) -> Compute:
    """One after the other."""
    resident, extra = zip(*work)
    return Compute(sum(resident), sum(extra))


class Held(NamedTuple):
    """What the cache of a sequence holds in `steps` decode steps: `slots` are in use; of a piece on disk `stored` slots
    and `log` rows are read, and `folds` times a step `folded` slots are written."""

    steps: int
    slots: int
    stored: int
    log: float
    folds: float
    folded: int


class Traffic(NamedTuple):
    """Bytes on each link (in the order of LINKS), moved one after the other, and in how many requests from and to
    disk."""

    read: float = 0.0  # disk to cpu
    write: float = 0.0  # cpu to disk
    into: float = 0.0  # cpu to gpu
    out: float = 0.0  # gpu to cpu
    reads: float = 0.0
    writes: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(self, other)))


@dataclass
class Flows:
    """What one or several layers take: seconds of compute, and the bytes of each lane of the engine."""

    compute: float
    weights_from_cpu: Traffic
    weights_from_disk: Traffic
    load: Traffic
    store: Traffic
    cache: Traffic = Traffic()  # pieces come beside each other: their reads and their copies each take their time

    @property
    def total(self) -> Traffic:
        return self.weights_from_cpu + self.weights_from_disk + self.load + self.store + self.cache


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
    terms: dict[str, dict[str, float]] = field(default_factory=dict)

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
        """The resource that is busy longest; where resources take turns, the one whose part is the largest."""
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
    """Costs policies for one model, job and machine."""

    def __init__(self, profile: Profile, shapes: Shapes, workload: Workload):
        self.profile, self.shapes, self.workload = profile, shapes, workload
        spec = shapes.spec
        self.kind = shapes.rule.name
        self.num_decoder = spec.layers
        self.hidden_bytes = spec.hidden * shapes.compute_itemsize
        matrices = [sum(prod(s) for s in layer.values() if len(s) > 1) for layer in shapes.streamed]
        self.layer_size, self.head_size = matrices[1], matrices[-1]  # elements of a decoder layer and of the head
        #: bytes of all decoder layers in the type of the computation
        self.decoder_bytes = sum(matrices[1:-1]) * shapes.compute_itemsize
        # a table whose rows are looked up is not packed
        looked_up = {n for whole, streamed in zip(shapes.layers, shapes.streamed) for n in whole if n not in streamed}
        self._layer_matrices, self._head_matrices = (
            [(s, name not in looked_up) for name, s in layer.items() if len(s) > 1]
            for layer in (shapes.streamed[1], shapes.streamed[-1])
        )
        sizes = [prod(s) for s in shapes.streamed[1].values() if len(s) > 1]
        # as beside a cache from disk; without one they come in fewer (offload/disk.py), which saves a little of compute
        count = sum(requests(n * shapes.stored_itemsize) for n in sizes)
        self._requests_per_byte = count / (sum(sizes) * shapes.compute_itemsize)
        #: bytes that must pass through the device in a step
        self.streamed_bytes = sum(matrices) * shapes.compute_itemsize
        self._layer_matmuls = lru_cache(maxsize=None)(self._layer_matmuls)
        self._head_matmuls = lru_cache(maxsize=None)(self._head_matmuls)
        self._decode_matmuls = lru_cache(maxsize=None)(self._decode_matmuls)
        self._prefill_batch = lru_cache(maxsize=None)(self._prefill_batch)

    # compute

    def _matmuls(self, matrices: list[tuple[Shape, bool]], rows: int) -> Compute:
        """Of `rows` rows with each of the matrices: (shape, whether it is packed where resident ones are)."""
        seconds = self.profile.matmul_seconds
        streamed = sum(seconds(shape, rows) for shape, _ in matrices)
        resident = sum(seconds(shape, rows, resident=packed) for shape, packed in matrices)
        return Compute(resident, max(0.0, streamed - resident))

    def _layer_matmuls(self, rows: int) -> Compute:
        return self._matmuls(self._layer_matrices, rows)

    def _head_matmuls(self, rows: int) -> Compute:
        return self._matmuls(self._head_matrices, rows)

    def _decode_matmuls(self, sizes: tuple[int, ...]) -> Compute:
        """A decode step of batches through a decoder layer, without attention."""
        steps = Compute(len(sizes) * self.profile.step_seconds)
        return add_up([steps, *map(self._layer_matmuls, matmul_rows(sizes))])

    def _attention(self, phase: str, work: float) -> float:
        """Seconds of one sequence in one layer."""
        spec = self.shapes.spec
        heads, group = (spec.heads, 1) if phase == "prefill" else (spec.kv_heads, spec.groups)
        return self.profile.attention_seconds(phase, self.kind, work, heads, spec.head_dim, group)

    def _prefill_batch(self, batch: int, length: int, prefill_tokens: int) -> Compute:
        """Prompts of `length` tokens in micro-batches through a decoder layer, with attention."""
        rows = min(batch, max(1, prefill_tokens // length))
        sizes = [rows] * (batch // rows) + [batch % rows] * (batch % rows > 0)
        flops = 4 * self.shapes.spec.query_width * prefill_pairs(length)
        rest = batch * self._attention("prefill", flops) + len(sizes) * self.profile.step_seconds
        return add_up([Compute(rest), *(self._layer_matmuls(n * length) for n in sizes)])

    def heads_compute(self, sizes: Sequence[int], streamed: float = 0.0) -> tuple[float, float]:
        """From the last hidden states of batches to tokens, in prefill and in a decode step; `streamed`: the part of
        the head's weights that is not resident."""
        return tuple(add_up(map(self._head_compute, n)).seconds(streamed) for n in (sizes, matmul_rows(sizes)))

    def _head_compute(self, batch: int) -> Compute:
        parts = [HEAD_ROWS] * (batch // HEAD_ROWS) + [batch % HEAD_ROWS] * (batch % HEAD_ROWS > 0)
        logits = batch * self.shapes.spec.vocab * self.profile.logit_seconds
        return add_up([Compute(logits), *map(self._head_matmuls, parts)])

    def prefill_compute(self, policy: Policy, batches: Batches, streamed: float = 0.0):
        """One decoder layer, all batches; `streamed`: the part of its weights that is not resident."""
        work = (self._prefill_batch(b, length, policy.prefill_tokens) for b, length in batches)
        return add_up(work).seconds(streamed)

    def decode_compute(
        self, policy: Policy, batches: Batches, slots: int, cache: Away, layers: int = 1, streamed: float = 0.0
    ):
        """`layers` decoder layers, all batches.

        Args:
            cache: sequences times layers that come from disk, or may be attended to on the CPU.
            streamed: the part of the layers' weights that is not resident.
        """
        matmuls = layers * self._decode_matmuls(tuple(b for b, _ in batches)).seconds(streamed)
        visits = cache.disk * (self.profile.visit_seconds / policy.gpu_batch_size)
        sequences = layers * sum(b for b, _ in batches)
        nbytes = slots * self.shapes.row_bytes
        each = self._attention("decode", nbytes)
        if not self._attends_on_cpu(policy):
            return matmuls + visits + sequences * each
        return matmuls + visits + (sequences - cache.cpu) * each + cache.cpu * self._attention("cpu", nbytes)

    def _attends_on_cpu(self, policy: Policy) -> bool:
        return policy.cpu_cache_compute and self.shapes.cuda and self.profile.cpu_attention is not None

    # traffic

    def conversion(self, away: Away):
        """Seconds of compute in which it converts the weights that come from disk."""
        if not self.shapes.converts_by_compute:
            return 0.0
        return self.profile.convert_seconds_per_byte * away.disk

    def _weights(self, away: Away) -> tuple[Traffic, Traffic]:
        """`away`: bytes in the type of the computation."""
        read = self.shapes.stored_ratio * away.disk
        reads = away.disk * self._requests_per_byte
        return Traffic(into=away.cpu), Traffic(read=read, into=away.disk if self.shapes.cuda else 0.0, reads=reads)

    def _activations(self, policy: Policy, away: Away, nbytes: float) -> tuple[Traffic, Traffic]:
        """Hidden states of `nbytes` a sequence, to the device and home, between two layers."""
        bus = 1 if self.shapes.cuda else 0
        crossing = nbytes * (away.cpu + bus * away.disk)
        pieces = self._piece_requests(policy, away, nbytes)
        return (
            Traffic(read=nbytes * away.disk, into=crossing, reads=pieces),
            Traffic(write=nbytes * away.disk, out=crossing, writes=pieces),
        )

    def _piece_requests(self, policy: Policy, away: Away, nbytes: float):
        """Of pieces of a batch on disk, `nbytes` a sequence."""
        batch = policy.gpu_batch_size
        return away.disk * (requests(ceil(batch * nbytes)) / batch)

    def prefill_flows(
        self, policy: Policy, compute, length: int, weights: Away, cache: Away, activations: Away
    ) -> Flows:
        """`length`: of the longest prompt; `weights`: those that come meanwhile, for the next layer."""
        shapes = self.shapes
        kept = shapes.slots if shapes.rule.growth == "fixed" else min(length, shapes.slots)
        kv, bus = kept * shapes.row_bytes, 1 if shapes.cuda else 0
        store = Traffic(
            write=cache.disk * kv,
            out=(cache.cpu + bus * cache.disk) * kv + bus * (cache.cpu + cache.disk) * shapes.meta_bytes,
            writes=self._piece_requests(policy, cache, kv),
        )
        into, home = self._activations(policy, activations, length * self.hidden_bytes)
        return Flows(compute, *self._weights(weights), into, store + home)

    def decode_flows(self, policy: Policy, compute, held: Held, weights: Away, cache: Away) -> Flows:
        """What a cache holds is read; a token is written, and a piece on disk is folded now and then."""
        shapes = self.shapes
        bus = 1 if shapes.cuda else 0
        row, meta = shapes.row_bytes, bus * shapes.meta_bytes  # scores are used where they lie if that is RAM
        kv, on_disk, log = held.slots * row, held.stored * row, held.log * row
        moves = 0 if policy.cpu_cache_compute else 1  # else a cache on the cpu tier is used where it lies
        read = cache.disk * (on_disk + log)
        fold = cache.disk * (held.folds * held.folded * row)
        parts = [on_disk + log] if shapes.rule.growth == "fixed" else [on_disk, log]  # what is read in one go
        load = Traffic(
            read=read,
            into=moves * cache.cpu * (kv + meta) + cache.disk * (meta + (kv if bus else log + kv - on_disk)),
            reads=sum(self._piece_requests(policy, cache, part) for part in parts),
        )
        store = Traffic(
            write=cache.disk * row + fold,
            out=moves * cache.cpu * (row + meta) + cache.disk * (row + meta) + bus * fold,
            writes=self._piece_requests(policy, cache, row)
            + held.folds * self._piece_requests(policy, cache, held.folded * row),
        )
        if self._attends_on_cpu(policy):
            size = self.hidden_bytes
            load, store = load + Traffic(into=cache.cpu * size), store + Traffic(out=cache.cpu * 3 * size)
        return Flows(compute, *self._weights(weights), Traffic(), store, load)

    def seconds(self, flows: Flows, overlap: bool) -> dict[str, float]:
        """What the flows take, by resource: the largest of these is the time, with overlap or without."""
        links = self.profile.links
        read, write, into, out = (1 / links[name].bytes_per_s for name in LINKS)
        each_read, each_write = (links[name].request_seconds for name in ("disk_to_cpu", "cpu_to_disk"))

        def disk(x: Traffic):
            return x.read * read + x.write * write + x.reads * each_read + x.writes * each_write

        def in_turn(x: Traffic):
            return disk(x) + x.into * into + x.out * out

        # while something computes a link moves less: the time that is missing comes on top
        slow = {name: link.slowed_by_compute * flows.compute for name, link in links.items()}
        total = flows.total
        # reads from disk run beside copies out of RAM, and of what has been read
        from_disk = disk(flows.weights_from_disk)
        staged = in_turn(flows.weights_from_cpu) + flows.weights_from_disk.into * into
        if not overlap:
            rest = flows.compute + in_turn(flows.load) + in_turn(flows.store) + in_turn(flows.cache)
            return {
                "all in turn (disk)": rest + from_disk,
                "all in turn": rest + staged,
                "compute": flows.compute,
                "disk": disk(total),
                "cpu to gpu": total.into * into,
                "gpu to cpu": total.out * out,
            }
        lost = sum(bytes_ * links[name].compute_seconds_per_byte for name, bytes_ in zip(LINKS, total))
        lost += total.reads * links["disk_to_cpu"].compute_seconds_per_request
        lost += total.writes * links["cpu_to_disk"].compute_seconds_per_request
        return {
            "compute": flows.compute,
            "compute and what copies take from it": flows.compute + lost,
            "disk": disk(total) + slow["disk_to_cpu"],
            "disk writes": total.write * write + total.writes * each_write + slow["cpu_to_disk"],
            "cpu to gpu": total.into * into + slow["cpu_to_gpu"],
            "gpu to cpu": total.out * out + slow["gpu_to_cpu"],
            "weights from disk": from_disk + slow["disk_to_cpu"],
            "weights": staged + slow["cpu_to_gpu"],
            "activations in": in_turn(flows.load),
            "cache from disk": disk(flows.cache),
            "cache to gpu": flows.cache.into * into,
            "cache and activations out": in_turn(flows.store),
        }

    def held(self, length: int) -> list[Held]:
        """What the caches of a block hold whose longest prompt has `length` tokens, for every kind of decode step."""
        gen_len, slots, log = self.workload.gen_len, self.shapes.slots, self.shapes.wal_rows
        steps = gen_len - 1
        if steps == 0:
            return []
        if self.shapes.rule.growth == "fixed":  # folded when its log is full
            rows = sum(i % (log + 1) for i in range(steps)) / steps
            return [Held(steps, slots, slots, rows, steps // (log + 1) / steps, slots)]
        found, end, segments = [], length, full_segments(length, gen_len)[1:]
        for n, segment in enumerate(segments, 1):  # each is a log until it is full
            folds = (n < len(segments)) / segment
            found.append(Held(segment, end + segment, end, (segment - 1) / 2, folds, segment))
            end += segment
        return found

    def batches(self, policy: Policy, begin: int) -> Batches:
        """Of the block that begins with prompt `begin`."""
        lens = self.workload.prompt_lens
        sizes = batch_sizes(len(lens) - begin, policy)
        starts = [begin, *(begin + n for n in accumulate(sizes))]
        return [(size, lens[start]) for size, start in zip(sizes, starts)]

    # a policy

    def predict(self, policy: Policy, placement: Placement) -> Prediction:
        """The time of the first block and of the job."""
        N, size = len(self.workload.prompt_lens), policy.block_size
        weights, known = self._weights_away(placement), {}

        def block(start: int) -> tuple[float, float, dict]:
            batches = tuple(self.batches(policy, start))
            if batches not in known:
                known[batches] = self._block(policy, placement, weights, batches)
            return known[batches]

        full = range(0, N - N % size, size)
        some = full[(len(full) - 1) // _MOST_BLOCKS // 2 :: -(-len(full) // _MOST_BLOCKS) or 1]  # stand for all
        jobs = [(start, len(full) / len(some)) for start in some] + ([(len(full) * size, 1)] if N % size else [])
        prefill, decode = (sum(times * block(start)[phase] for start, times in jobs) for phase in (0, 1))
        first = block(0)
        return Prediction(first[0], first[1], prefill, decode, min(N, size), self.workload.gen_len, N, first[2])

    def _block(
        self, policy: Policy, placement: Placement, away: list[Away], batches: Batches
    ) -> tuple[float, float, dict]:
        """Seconds of prefill and decode, and the terms; `away`: the weights of each layer."""
        sizes, length = [b for b, _ in batches], batches[0][1]
        cache = self._cache_away(placement, sizes)
        acts = _away(placement.activations, sizes)
        terms = {"prefill": Counter(), "decode": Counter()}

        def spend(phase: str, times: int, flows: Flows, matmuls: float = 0.0, late: float = 0.0) -> float:
            seconds = self.seconds(flows, policy.overlap)
            if late > 0 and policy.overlap:
                cache_in = max(seconds["cache from disk"], seconds["cache to gpu"])
                seconds["cache behind matmuls"] = matmuls + late * cache_in
            for name, value in seconds.items():
                terms[phase][name] += times * value
            return times * max(seconds.values())

        # layers that are alike are costed once
        nothing, coming = Away(), weights_beside(away)
        alike = Counter(zip(away[1:-1], coming[1:-1], cache))
        embedding, last = self.conversion(away[0]), self.conversion(away[-1])
        heads = self.heads_compute(sizes, _part(away[-1], self.head_size * self.shapes.compute_itemsize))
        prefill_ends, decode_ends = ([(embedding, coming[0]), (last + head, coming[-1])] for head in heads)
        layer_bytes = self.layer_size * self.shapes.compute_itemsize
        prefill = 0.0
        for (w, next_w, c), n in alike.items():
            work = self.prefill_compute(policy, batches, _part(w, layer_bytes)) + self.conversion(w)
            prefill += spend("prefill", n, self.prefill_flows(policy, work, length, next_w, c, acts))
        for work, next_w in prefill_ends:
            prefill += spend("prefill", 1, self.prefill_flows(policy, work, length, next_w, nothing, nothing))
        first = next((w for w in away if w != nothing), nothing)  # nothing runs beside the very first
        if policy.overlap:
            prefill += max(self.seconds(Flows(0.0, *self._weights(first), Traffic(), Traffic()), True).values())
        decode, matmuls, groups = 0.0, self._decode_matmuls(tuple(sizes)), len(matmul_rows(sizes))
        for held in self.held(length):
            for (w, next_w, c), n in alike.items():
                part = _part(w, layer_bytes)
                work = self.decode_compute(policy, batches, held.slots, c, 1, part) + self.conversion(w)
                flows = self.decode_flows(policy, work, held, next_w, c)
                late = self._late(policy, groups, c)
                decode += spend("decode", held.steps * n, flows, matmuls.seconds(part), late)
            for work, next_w in decode_ends:
                decode += spend("decode", held.steps, self.decode_flows(policy, work, held, next_w, nothing))
        return prefill, decode, terms

    def _late(self, policy: Policy, groups: int, cache: Away) -> float:
        """The part of a layer's cache that cannot come while `groups` of batches compute their matmuls together:
        attention frees the slots."""
        pieces = (cache.disk + (0 if policy.cpu_cache_compute else cache.cpu)) / policy.gpu_batch_size
        return 1 - kv_buffers(True, cache.disk > 0) * groups / pieces if pieces else 0.0

    def _weights_away(self, placement: Placement) -> list[Away]:
        size = self.shapes.compute_itemsize
        found = []
        for layer in self.shapes.streamed:
            sums = {"gpu": 0, "cpu": 0, "disk": 0}
            for name, shape in layer.items():
                if len(shape) > 1:
                    sums[placement.weights[name]] += prod(shape) * size
            found.append(Away(sums["cpu"], sums["disk"]))
        return found

    def _cache_away(self, placement: Placement, sizes: list[int]) -> list[Away]:
        """Sequences of each decoder layer whose cache is away."""
        keys = range(len(sizes))
        return [_away([placement.cache[layer, k] for k in keys], sizes) for layer in range(self.num_decoder)]


def weights_beside(away: list[Away]) -> list[Away]:
    """The weights that come while each layer computes: those of the next layer that streams, which the engine fetches
    from the layer that streamed before it on. `away`: of each layer."""
    nothing = Away()
    coming = [nothing] * len(away)
    begin = 0 if away[0] != nothing else 1  # an embedding that does not stream takes no time either
    streams = [j for j, w in enumerate(away) if w != nothing]
    turn = len(away) - begin
    for before, j in zip([streams[-1] - turn, *streams] if streams else [], streams):
        for at in range(before, j):
            coming[at if at >= begin else at + turn] = Away(*(x / (j - before) for x in away[j]))
    return coming


def _part(away: Away, nbytes: int) -> float:
    """How much of a layer's weights is streamed."""
    return (away.cpu + away.disk) / nbytes


def _away(homes: list[str], sizes: list[int]) -> Away:
    sums = {"gpu": 0, "cpu": 0, "disk": 0}
    for home, size in zip(homes, sizes):
        sums[home] += size
    return Away(sums["cpu"], sums["disk"])
