"""How long a job takes under a policy, on hardware as profiled. Pure Python.

The model follows the engine: per layer, compute and the transfer queues run beside each other, and the slowest decides
(FlexGen, arXiv 2303.06865, section 4.3, with this engine's queues). Every quantity is linear in what is on each tier,
so the same functions cost a placement and write down the linear program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import ceil, prod, sqrt
from typing import NamedTuple

from h2o_flexgen.kernels.attention import prefill_pairs
from h2o_flexgen.machine.profile import Profile
from h2o_flexgen.planning.occupancy import expected, stretches
from h2o_flexgen.planning.placement import Placement
from h2o_flexgen.planning.shapes import Shapes
from h2o_flexgen.planning.traffic import Flows, Offloaded, Traffic, weights_beside
from h2o_flexgen.planning.workload import GROUP_ROWS, HEAD_ROWS, batch_sizes, matmul_rows
from h2o_flexgen.policy import Policy
from h2o_flexgen.storage.disk import requests
from h2o_flexgen.storage.queues import KV_BUFFERS
from h2o_flexgen.storage.wal import wal_rows

#: the batches of a block: sequences, and tokens of the longest prompt
Batches = Sequence[tuple[int, int]]
#: attention over a cache takes this many times as long if its keys are rotated when they are used: measured on 2 cores,
#: with 205 to 1025 slots of 3 to 32 heads, 1.4 to 2.3 in fp32, 1.5 to 2.8 in bf16, 1.5 to 2 in fp16
ROLLED = 2.0
#: full blocks of a job that are costed at most
_MOST_BLOCKS = 32
#: a decoder layer, which stands for all, and the head, among the layers
_DECODER = -2
_HEAD = -1


class Part(NamedTuple):
    """What one or several decoder layers have off the device: numbers, or expressions of a linear program.

    Attributes:
        weights: bytes that are fetched meanwhile, as they are in memory.
        streamed: the part of the layers' own weights, in [0, 1], that is not resident.
        cache, activations: sequences times layers.
    """

    weights: Offloaded = Offloaded()
    streamed: float = 0.0
    cache: Offloaded = Offloaded()
    activations: Offloaded = Offloaded()
    layers: int = 1


class CacheState(NamedTuple):
    """The cache of a sequence in the average decode step.

    Attributes:
        slots: in use.
        read: slots and rows of the write-ahead log that are read of a KV block on disk.
        compactions, compacted: how often a step compacts the log, and the slots that this writes.
    """

    slots: float
    read: float
    compactions: float
    compacted: float


@dataclass
class Prediction:
    """What a policy costs.

    Attributes:
        prefill_seconds, decode_seconds: of the first, full block.
        job_prefill_seconds, job_decode_seconds: of all blocks.
        block_size: prompts of the first block.
        gen_len: tokens of the average output.
        busy: seconds of each resource in the longer phase of the first block, the busiest first.
    """

    prefill_seconds: float
    decode_seconds: float
    job_prefill_seconds: float
    job_decode_seconds: float
    block_size: int
    gen_len: float
    num_prompts: int
    busy: list[tuple[str, float]]

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

    @property
    def bound_by(self) -> str:
        """The resource that is busy longest."""
        return self.busy[0][0]

    def of_job(self) -> dict[str, float | str]:
        """For a report, as plain data."""
        return {
            "prefill_seconds": self.job_prefill_seconds,
            "decode_seconds": self.job_decode_seconds,
            "tokens_per_s": self.tokens_per_s,
            "bound_by": self.bound_by,
        }


#: (policy, batches, what layers have off the device) -> what runs in them at the same time
LayerFlows = Callable[[Policy, Batches, Part], Flows]
#: [(how often, what runs in layers, seconds of the head)]
Phases = list[tuple[float, LayerFlows, float]]


class CostModel:
    """Costs policies for one model, length of outputs and machine.

    Attributes:
        streamed_bytes: weights that a step needs whole, as they are in memory.
        steps: decode steps of the average row.
    """

    def __init__(self, profile: Profile, shapes: Shapes, gen_len: int):
        self.profile = profile
        self.shapes = shapes
        self.gen_len = gen_len
        work = shapes.workload
        self.steps = gen_len - 1 if work.mean_len is None else min(gen_len - 1, max(0.0, work.mean_len - 1))
        self.computed = 1 - work.shared / sum(work.prompt_lens)  # the part of the prompts that is not shared
        self.hidden_bytes = shapes.spec.hidden * shapes.itemsize
        # of decoder layers and head; the few that some embeddings have count with the first layer
        embedding, first, *others = ({n: s for n, s in x.items() if len(s) > 1} for x in shapes.streamed)
        self._matrices = [embedding | first, *others]
        self._layer_bytes = [sum(map(shapes.nbytes, layer)) for layer in self._matrices]
        self.streamed_bytes = sum(self._layer_bytes)
        # a table whose rows are looked up is not packed, nor is what must be decoded or unpacked
        gathered = {name for layer in shapes.layers for name, _ in layer.gathered.values()}
        self._packed = set(filter(shapes.read_as_kept, shapes.formats)) - gathered
        self._crosses = 1 if shapes.cuda else 0  # whether disk data passes between the CPU and the GPU
        for name in ("_matmuls_of", "_attention", "_decoding"):
            setattr(self, name, lru_cache(maxsize=None)(getattr(self, name)))

    # compute

    def _matmuls_of(self, layer: int, rows: int) -> tuple[float, float]:
        """Seconds of `rows` rows with the matrices of a layer if all are resident, and how many more if all stream."""
        seconds = self.profile.matmul_seconds
        matrices = [(n, shape, self._weight_bits(n)) for n, shape in self._matrices[layer].items()]
        streamed = sum(seconds(shape, rows, bits=bits) for _, shape, bits in matrices)
        resident = sum(seconds(shape, rows, resident=n in self._packed, bits=bits) for n, shape, bits in matrices)
        return resident, max(0.0, streamed - resident)

    def _weight_bits(self, name: str) -> int | None:
        """Of a matrix as matmuls in int8 read it; None if it is multiplied as floats."""
        return None if not self.shapes.in_int8(name) else 4 if self.shapes.reads_blocks(name) else 8

    def _matmuls(self, layer: int, rows: Counter, streamed: float) -> float:
        """Seconds with the matrices of a layer.

        Args:
            rows: {rows that are multiplied together: how often}.
            streamed: the part of the layer's weights, in [0, 1], that is not resident; it may be an expression of a
                linear program.
        """
        seconds = [[times * s for s in self._matmuls_of(layer, n)] for n, times in rows.items()]
        resident, more = map(sum, zip(*seconds))
        return resident + more * streamed

    def _attention(self, phase: str, work: float) -> float:
        """Seconds of one sequence in one layer."""
        spec = self.shapes.spec
        heads, group = (spec.heads, 1) if phase == "prefill" else (spec.kv_heads, spec.groups)
        rates = self.profile.attention[phase][self.shapes.rule.measured_as(phase)]
        rolled = ROLLED if self.shapes.rule.rope and phase != "prefill" else 1.0
        return rolled * rates.seconds(work, heads, spec.head_dim, group)

    def _cached_attention(self, phase: str, slots: float) -> float:
        """Seconds of one sequence in one layer, of as many slots. Codes take a CPU as long as floats; on a GPU, and
        where keys are rotated, they become floats first."""
        spec = self.shapes.spec
        form = self.shapes.kv_format
        itemsize = self.shapes.itemsize
        if form.is_dense or not (self.shapes.cuda or self.shapes.rule.rope):
            return self._attention(phase, 2 * slots * spec.kv_width * itemsize)
        seconds = slots * spec.kv_width * sum(1 / self.profile.decode_rate(each.bits) for each in form)
        return seconds + self._attention(phase, 2 * slots * spec.kv_width * itemsize)

    def _head_compute(self, rows: list[int], streamed: float) -> float:
        """From the last hidden states to tokens. `rows`: sequences that go through the head together."""
        parts = sum((_cut(n, HEAD_ROWS) for n in rows), Counter())
        return self._matmuls(_HEAD, parts, streamed) + parts.total() * self._decoding(_HEAD)

    def _decoding(self, layer: int) -> float:
        """Seconds in which compute decodes the quantised matrices of a layer, or unpacks them to int8."""
        seconds = 0.0
        shapes = self.shapes
        for name, shape in self._matrices[layer].items():
            if not shapes.read_as_kept(name):
                rate = self.profile.unpack_rate if shapes.in_int8(name) else self.profile.decode_rate
                seconds += prod(shape) / rate(shapes.formats[name].bits)
        return seconds

    def _conversion(self, weights: Offloaded) -> float:
        """Seconds in which compute converts the weights that come from disk, about as fast as a copy in RAM."""
        per_byte = 1 / self.profile.links["cpu_to_gpu"].bytes_per_s
        return per_byte * weights.disk if self.shapes.converts_by_compute else 0.0

    # what runs at the same time

    def phases(self, batches: Batches, streamed: float = 0.0) -> Phases:
        """Of a block: prefill, and decode steps. `streamed`: the part
        of the head's weights that is not resident."""
        sizes = [size for size, _ in batches]
        prefill, decode = (self._head_compute(rows, streamed) for rows in (sizes, matmul_rows(sizes)))
        return [(1, self.prefill, prefill), (self.steps, self.decode, decode)]

    def prefill(self, policy: Policy, batches: Batches, part: Part) -> Flows:
        """Of a block, in the layers of `part`."""
        rows = Counter()
        compute = 0.0
        for (size, length), count in Counter(batches).items():
            for n, times in _cut(size, max(1, policy.prefill_tokens // length)).items():
                rows[n * length] += count * times
            pairs = prefill_pairs(length, self.shapes.device, self.shapes.workload.cached_len)
            flops = 4 * self.shapes.spec.query_width * pairs
            compute += count * size * self._attention("prefill", flops)
        compute += self._matmuls(_DECODER, rows, part.streamed) + rows.total() * self.profile.step_seconds
        compute += self._decoding(_DECODER)
        compute *= self.computed
        length = batches[0][1]
        layout = self.shapes.kv
        before = self.shapes.workload.cached_len
        crosses = self._crosses
        after = min(before + self.shapes.rule.cached_len(length, length), layout.slots)
        old = before * layout.row_bytes
        kv = after * layout.row_bytes
        hidden = length * self.hidden_bytes
        cache = part.cache
        activations = part.activations
        copied = hidden * (activations.cpu + crosses * activations.disk)
        return Flows(
            part.layers * compute + self._conversion(part.weights),
            self._weights(part.weights),
            _read(policy, activations.disk, hidden) + Traffic(cpu_to_gpu=copied),
            cache_in=_read(policy, cache.disk, old) + Traffic(cpu_to_gpu=(cache.cpu + crosses * cache.disk) * old),
            write_back=_write(policy, activations.disk, hidden)
            + _write(policy, cache.disk, kv)
            + Traffic(gpu_to_cpu=copied + (cache.cpu + crosses * cache.disk) * kv),
        )

    def decode(self, policy: Policy, batches: Batches, part: Part) -> Flows:
        """Of a step: the cache is read, one token is written back, and now and then a KV block on disk is compacted."""
        sizes = [size for size, _ in batches]
        state = self.cache_state(batches[0][1])
        row = self.shapes.kv.row_bytes
        groups = matmul_rows(sizes)
        kv = state.slots * row
        cache = part.cache
        matmuls = part.layers * self._matmuls(_DECODER, Counter(groups), part.streamed)
        on_cpu = cache.cpu if policy.cpu_cache_compute else 0  # attended to where it is
        # compiled loops read no slot of a cache that grows which is not in use
        is_whole = self.shapes.cuda or self.shapes.rule.growth == "fixed"
        attended = state.slots if is_whole else state.read + 1
        attention = (part.layers * sum(sizes) - on_cpu) * self._cached_attention("decode", attended)
        attention += on_cpu * self._cached_attention("cpu" if self.shapes.cuda else "decode", attended)
        dispatch = part.layers * (len(sizes) * self.profile.step_seconds + self._decoding(_DECODER))

        def cache_in(disk: float, copied: float) -> Traffic:
            return _read(policy, disk, state.read * row) + Traffic(cpu_to_gpu=copied * kv)

        copied = cache.cpu - on_cpu + self._crosses * cache.disk
        handed = self._crosses * on_cpu * self.hidden_bytes  # queries to the CPU, or the context back
        staged = part.layers * len(groups) * KV_BUFFERS * policy.gpu_batch_size
        return Flows(
            matmuls + attention + dispatch + self._conversion(part.weights),
            self._weights(part.weights),
            cache_in=cache_in(cache.disk, copied) + Traffic(cpu_to_gpu=handed),
            write_back=_write(policy, cache.disk, row)
            + _write(policy, cache.disk * state.compactions, state.compacted * row)
            + Traffic(gpu_to_cpu=copied * row + 3 * handed),
            matmuls=matmuls,
            cache_beside_matmuls=cache_in(staged, staged),
        )

    def _weights(self, weights: Offloaded) -> Traffic:
        read = self.shapes.stored_ratio * weights.disk
        crosses = self._crosses
        return Traffic(disk_to_cpu=read, cpu_to_gpu=weights.cpu + crosses * weights.disk)

    def cache_state(self, length: int) -> CacheState:
        """Of a sequence in a block whose longest prompt has `length` tokens."""
        steps = max(1, self.gen_len - 1)
        if self.shapes.rule.growth == "fixed":  # compacted when the log is full
            slots = self.shapes.kv.slots
            rows = wal_rows(self.shapes.kv.segments)
            return CacheState(slots, slots + min(rows, steps - 1) / 2, steps // (rows + 1) / steps, slots)
        # a log is the open segment, until it is full
        prompt, *segments = self.shapes.rule.segments(length, self.gen_len)
        closed = sum(n * end for n, end in zip(segments, accumulate(segments, initial=prompt))) / steps
        open_slots = sum(n * n for n in segments) / steps
        compactions = max(0, len(segments) - 1) / steps
        return CacheState(closed + open_slots, closed + (open_slots - 1) / 2, compactions, open_slots)

    # a job

    def predict(
        self, policy: Policy, placement: Placement, prompt_lens: Sequence[int], lengths: Sequence[int] | None = None
    ) -> Prediction:
        """The time of a job, and of its first block.

        Args:
            prompt_lens: the longest first.
            lengths: of the outputs, in the order in which rows run; None: as the workload expects them.
        """
        if lengths is None:
            lengths = expected(len(prompt_lens), self.gen_len, self.shapes.workload.mean_len)
        N = len(prompt_lens)
        size = min(policy.block_size, len(prompt_lens))
        weights = [
            _offloaded((placement.weights[name], self.shapes.nbytes(name)) for name in layer)
            for layer in self._matrices
        ]
        known = {}

        def block(begin: int) -> tuple[list[float], list[Counter]]:
            batches = batches_of(policy, prompt_lens[begin : begin + size])
            if batches not in known:
                known[batches] = self._block(policy, placement, weights, batches)
            return known[batches]

        full, rest = divmod(N, size)
        sample = [block(n * size) for n in range(0, full, ceil(full / _MOST_BLOCKS))]
        blocks = [(full / len(sample), found) for found in sample] + ([(1, block(full * size))] if rest else [])
        job = [sum(times * seconds[phase] for times, (seconds, _) in blocks) for phase in (0, 1)]
        (prefill, decode), busy = sample[0]
        tokens = float(self.gen_len)
        if min(min(lengths), self.steps + 1) < self.gen_len:
            job = self._refilled(policy, placement, weights, prompt_lens, lengths)
            tokens = sum(lengths) / len(lengths)
        return Prediction(prefill, decode, *job, size, tokens, N, busy[int(decode >= prefill)].most_common())

    def least_free(self, policy: Policy, prompt_len: int, prediction: Prediction) -> int:
        """How many places should be free before rows enter: matmuls of few tokens are slow, and a place left free is
        lost. With n rows at a time the slowness costs s / n a row; a place is free for n lives / 2 places passes, each
        of which is worth t / places. The sum of both is least at n = places sqrt(2 s / (life t)). Prompts that join the
        matmuls of a decode step cost nothing more."""
        if self.steps <= 0 or prompt_len <= GROUP_ROWS:
            return 1
        most = max(policy.prefill_tokens, prompt_len)
        alone, among = (self._matmuls(_DECODER, Counter([n]), 0.0) / n for n in (prompt_len, most))
        slowness = self.shapes.spec.layers * prompt_len * max(0.0, alone - among)
        places = prediction.block_size
        found = places * sqrt(2 * slowness / prediction.decode_seconds)
        return max(1, min(round(found), places // 4))

    def _refilled(
        self,
        policy: Policy,
        placement: Placement,
        weights: list[Offloaded],
        prompt_lens: Sequence[int],
        lengths: Sequence[int],
    ) -> list[float]:
        """Seconds of prefill and of decode where rows take the places of those that have ended."""
        job = [0.0, 0.0]
        mean = ceil(sum(prompt_lens) / len(prompt_lens))
        for passes, decoding, entering in stretches(lengths, min(policy.block_size, len(prompt_lens))):
            found = []
            for rows, of_phase in ((entering, 0), (decoding, 1)):
                batches = tuple((size, mean) for size in batch_sizes(max(1, round(rows)), policy))
                (_, flows, head) = self.phases(batches)[of_phase]
                found.append((rows / max(1, round(rows)), batches, [(1, flows, head)]))
            alone = [
                part * self._seconds(policy, placement, weights, batches, phases)[0][0]
                for part, batches, phases in found
            ]
            # what streams comes once for both
            both = max(sum(alone) - self._streaming(policy, weights) * (min(alone) > 0), *alone)
            for phase in (0, 1):
                job[phase] += passes * both * alone[phase] / sum(alone)
        return job

    def _streaming(self, policy: Policy, weights: list[Offloaded]) -> float:
        """Seconds in which the weights of a pass come."""
        total = Offloaded(*map(sum, zip(*weights)))
        return max(Flows(0.0, self._weights(total)).bounds(self.profile.links, policy.overlap))

    def _block(
        self, policy: Policy, placement: Placement, weights: list[Offloaded], batches: Batches
    ) -> tuple[list[float], list[Counter]]:
        """Seconds of prefill and decode of a full block, and those of each resource in them."""
        streamed = sum(weights[-1]) / self._layer_bytes[-1]
        return self._seconds(policy, placement, weights, batches, self.phases(batches, streamed))

    def _seconds(
        self, policy: Policy, placement: Placement, weights: list[Offloaded], batches: Batches, phases: Phases
    ) -> tuple[list[float], list[Counter]]:
        """Seconds of each phase, and those of each resource in it. `weights`: of each layer."""
        links = self.profile.links
        sizes = [size for size, _ in batches]
        activations = _offloaded(zip(placement.activations, sizes))
        caches = [
            _offloaded((placement.cache[layer, k], size) for k, size in enumerate(sizes))
            for layer in range(self.shapes.spec.layers)
        ]
        *fetched, beside_head = weights_beside(weights)
        streamed = [sum(w) / nbytes for w, nbytes in zip(weights, self._layer_bytes)]
        # layers that are alike are costed once: what they have off the device -> how many
        alike = Counter(Part(*part, activations) for part in zip(fetched, streamed, caches))
        seconds = []
        busy = []
        for steps, layer_flows, head in phases:
            flows = [(n, layer_flows(policy, batches, part)) for part, n in alike.items()]
            flows.append((1, Flows(head + self._conversion(beside_head), self._weights(beside_head))))
            seconds.append(steps * sum(n * max(each.bounds(links, policy.overlap)) for n, each in flows))
            busy.append(Counter())
            for n, each in flows:
                busy[-1].update({name: steps * n * value for name, value in each.busy(links).items()})
        return seconds, busy


def batches_of(policy: Policy, prompt_lens: Sequence[int]) -> Batches:
    """Of a block of these prompts, the longest first."""
    return tuple(zip(batch_sizes(len(prompt_lens), policy), prompt_lens[:: policy.gpu_batch_size]))


def _read(policy: Policy, sequences: float, nbytes: float) -> Traffic:
    """`nbytes` of each of the sequences from disk, one batch after the other."""
    return Traffic(disk_to_cpu=sequences * nbytes, reads=sequences * _requests_each(policy, nbytes))


def _write(policy: Policy, sequences: float, nbytes: float) -> Traffic:
    return Traffic(cpu_to_disk=sequences * nbytes, writes=sequences * _requests_each(policy, nbytes))


def _requests_each(policy: Policy, nbytes: float) -> float:
    batch = policy.gpu_batch_size
    return requests(ceil(batch * nbytes)) / batch


def _offloaded(sizes: Iterable[tuple[str, int]]) -> Offloaded:
    """`sizes`: (tier, bytes or sequences)."""
    sums = {"gpu": 0, "cpu": 0, "disk": 0}
    for tier, size in sizes:
        sums[tier] += size
    return Offloaded(sums["cpu"], sums["disk"])


def _cut(total: int, most: int) -> Counter:
    """`total` rows in parts of `most`: {rows: how often}."""
    full, rest = divmod(total, most)
    return Counter([most] * full + [rest] * int(rest > 0))
