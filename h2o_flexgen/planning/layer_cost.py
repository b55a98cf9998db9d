"""What decoder layers and the vocabulary head compute and move, in prefill and in a decode step.

All quantities are linear in what is on each tier, so the same formulas cost a placement, arrays of placements and the
variables of a linear program (`traffic.Amount`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from math import ceil, prod
from typing import NamedTuple

from h2o_flexgen.kernels.attention import prefill_pairs
from h2o_flexgen.machine.profile import Profile
from h2o_flexgen.planning.shapes import DECODER, HEAD, Shapes
from h2o_flexgen.planning.traffic import Amount, Flows, Offloaded, Traffic
from h2o_flexgen.planning.workload import HEAD_ROWS, Batch, group_rows, matmul_rows, read_share
from h2o_flexgen.policy import Policy
from h2o_flexgen.storage.disk import requests
from h2o_flexgen.storage.queues import KV_BUFFERS
from h2o_flexgen.storage.wal import wal_rows

#: attention over a cache takes this many times as long if keys are rotated when they are used: measured on 2 cores,
#: with 205 to 1025 slots of 3 to 32 heads, 1.4 to 2.3 in fp32, 1.5 to 2.8 in bf16, 1.5 to 2 in fp16
ROLLED = 2.0


class Part(NamedTuple):
    """What one or several decoder layers have off the device.

    Attributes:
        weights: bytes in memory of the weights that are fetched meanwhile.
        streamed: fraction of the layers' own weights that is not resident.
        cache, activations: sequences times layers.
    """

    weights: Offloaded = Offloaded()
    streamed: Amount = 0.0
    cache: Offloaded = Offloaded()
    activations: Offloaded = Offloaded()
    layers: int = 1


class CacheState(NamedTuple):
    """The cache of a sequence in one layer, in the average decode step."""

    slots: float  # in use
    read: float  # slots and rows of the write-ahead log that are read of a KV block on disk
    compactions: float  # of the log, per step
    compacted: float  # slots that a compaction writes


class LayerCost:
    """Costs of the layers of one model on one machine.

    Attributes:
        matrices: {name: shape} of the matrices of each decoder layer and of the head. Matrices of the embedding layer
            that are needed whole count with the first decoder layer.
        layer_bytes: bytes in memory of these matrices.
        hidden_bytes: bytes of a token's state between two stages.
        computed: fraction of the prompts' tokens that is computed; the rest is shared with another prompt.
    """

    def __init__(self, profile: Profile, shapes: Shapes, gen_len: int):
        self.profile = profile
        self.shapes = shapes
        self.gen_len = gen_len
        work = shapes.workload
        self.computed = 1 - work.shared / sum(work.prompt_lens)
        self.hidden_bytes = shapes.spec.state_width * shapes.itemsize
        embedding, first, *others = map(_matrices, shapes.streamed)
        self.matrices = [embedding | first, *others]
        self.layer_bytes = [sum(map(shapes.nbytes, layer)) for layer in self.matrices]
        kinds = [self._kind(layer) for layer in self.matrices[:-1]]
        #: {a decoder layer of each kind: fraction of the layers that are of it}
        self._decoders = {kinds.index(kind): count / len(kinds) for kind, count in Counter(kinds).items()}
        self._stages = (len(shapes.units) - 2) / (len(shapes.layers) - 2)  # of a decoder layer
        decoders = [name for layer in self.matrices[:-1] for name in layer]
        of_experts = sum(shapes.nbytes(name) for name in decoders if name in shapes.experts)
        self._expert_share = of_experts / sum(map(shapes.nbytes, decoders))
        # resident matrices are packed, except tables whose rows are looked up, and those that are decoded or unpacked
        gathered = {name for layer in shapes.layers for name, _ in layer.gathered.values()}
        self._packed = {name for name, form in shapes.forms.items() if form.is_direct} - gathered
        self._crosses = 1 if shapes.cuda else 0  # whether disk data is also copied between the host and the GPU
        self.matmul_seconds = cache(self.matmul_seconds)
        self._attention = cache(self._attention)
        self._decoding = cache(self._decoding)

    def _kind(self, layer: dict[str, tuple[int, ...]]) -> tuple:
        """What decides the seconds of a layer's matmuls."""
        return tuple((self.shapes.forms[name], shape) for name, shape in layer.items())

    # seconds of compute

    def matmul_seconds(self, layer: int, rows: int, resident: bool = True) -> float:
        """`rows` rows through the matrices of a layer, together; all of these are resident or all stream. DECODER is
        the average decoder layer."""
        if layer == DECODER:
            parts = self._decoders.items()
            return sum(share * self.matmul_seconds(index, rows, resident) for index, share in parts)
        return sum(self._matrix_seconds(name, shape, rows, resident) for name, shape in self.matrices[layer].items())

    def _matrix_seconds(self, name: str, shape: tuple[int, ...], rows: int, resident: bool) -> float:
        """Of a matrix, or of the same one of a group of experts, which share the rows evenly."""
        form = self.shapes.forms[name]
        codes = form.operand.name if form.in_int8 else None
        count = self.shapes.experts.get(name, 0)
        if not count:
            return self.profile.matmul_seconds(shape, rows, resident and name in self._packed, codes)
        spec = self.shapes.spec
        used = spec.touched(rows)
        each = rows * spec.active / spec.experts / used
        shape = (shape[0] // count, shape[1])
        return count * used * self.profile.matmul_seconds(shape, each, codes=codes, of_experts=True)

    def _matmuls(self, layer: int, rows: Counter[int], streamed: Amount) -> Amount:
        """Seconds of the matmuls of a layer. `rows`: {rows of a matmul: how many such matmuls}; `streamed`: fraction of
        the layer's weights that is not resident."""
        resident = 0.0
        added = 0.0  # if all stream
        for count, times in rows.items():
            seconds = self.matmul_seconds(layer, count)
            resident += times * seconds
            added += times * max(0.0, self.matmul_seconds(layer, count, resident=False) - seconds)
        return resident + added * streamed

    def _attention(self, kind: Shapes, phase: str, work: float) -> float:
        """Seconds of one sequence in one layer of a kind; phase and work as for `Profile.attention`."""
        spec = kind.spec
        rule = kind.rule
        rates = self.profile.attention[phase][rule.measured_as(phase)]
        if phase == "prefill":
            return rates.seconds(work, spec.heads, spec.head_dim)
        seconds = rates.seconds(work, spec.kv_heads, spec.head_dim, spec.groups)
        return ROLLED * seconds if rule.rope else seconds

    def _cached_attention(self, shapes: Shapes, phase: str, slots: float) -> float:
        """Seconds of one sequence in one layer of a kind, over `slots` slots. Quantised vectors take a CPU as long as
        floats; on a GPU, and where keys are rotated, they are decoded first."""
        elements = slots * shapes.spec.kv_width  # of K, and as many of V
        seconds = self._attention(shapes, phase, 2 * elements * shapes.itemsize)
        if shapes.kv_format.is_dense or not (shapes.cuda or shapes.rule.rope):
            return seconds
        return seconds + elements * sum(1 / self.profile.decode_rate(form.name) for form in shapes.kv_format)

    def head_seconds(self, rows: Sequence[int], streamed: Amount) -> Amount:
        """Seconds from the last hidden states to tokens. `rows`: sequences that go through the head together;
        `streamed`: fraction of the head's weights that is not resident."""
        parts = sum((_cut(count, HEAD_ROWS) for count in rows), Counter())
        return self._matmuls(HEAD, parts, streamed) + parts.total() * self._decoding(HEAD)

    def _decoding(self, layer: int, read: float = 1.0) -> float:
        """Seconds in which a layer's quantised matrices are decoded, or unpacked to int8; `read`: fraction of the
        experts that are."""
        if layer == DECODER:
            return sum(share * self._decoding(index, read) for index, share in self._decoders.items())
        seconds = 0.0
        for name, shape in self.matrices[layer].items():
            form = self.shapes.forms[name]
            if not form.is_direct:
                rate = self.profile.unpack_rate if form.in_int8 else self.profile.decode_rate
                part = read if name in self.shapes.experts else 1.0
                seconds += part * prod(shape) / rate(form.kept.name)
        return seconds

    def conversion(self, weights: Offloaded) -> Amount:
        """Seconds in which compute converts weights from disk, about as fast as a copy in RAM."""
        per_byte = 1 / self.profile.links["cpu_to_gpu"].bytes_per_s
        return per_byte * weights.disk if self.shapes.converts_by_compute else 0.0

    def _prefill_compute(self, policy: Policy, batches: Sequence[Batch], streamed: Amount) -> Amount:
        """Seconds of a decoder layer for the prompts of a block."""
        # rows behind a shared prefix attend one by one, their own tokens to all tokens
        seen = self.computed * (2 - self.computed)
        calls = 0
        rows: Counter[int] = Counter()
        attention = 0.0
        for (size, longest), count in Counter(batches).items():
            for sequences, times in _cut(size, max(1, policy.prefill_tokens // longest)).items():
                rows[sequences * longest] += count * times
            attention += count * size * self.shapes.mean(partial(self._prefill_attention, seen, longest))
            calls += count * size
        dispatch = (rows.total() if self.computed == 1 else calls) * self.profile.step_seconds
        matmuls = self._matmuls(DECODER, rows, streamed)
        return attention + self.computed * matmuls + dispatch + self._decoding(DECODER)

    def _prefill_attention(self, seen: float, longest: int, kind: Shapes) -> float:
        """Seconds of one prompt in one layer of a kind; `seen`: the fraction of the attention that is computed."""
        pairs = prefill_pairs(longest, kind.device, kind.workload.cached_len, kind.rule.softmax.window)
        return self._attention(kind, "prefill", seen * (4 * kind.spec.query_width * pairs))

    def _decode_attention(self, longest: int, on_device: Amount, on_host: Amount) -> Amount:
        """Seconds of a decode step's attention, for sequences times layers whose attention runs on each."""

        def seconds(phase: str) -> float:
            return self.shapes.mean(lambda kind: self._cached_attention(kind, phase, self._attended(kind, longest)))

        return on_device * seconds("decode") + on_host * seconds("cpu" if self.shapes.cuda else "decode")

    def _attended(self, kind: Shapes, longest: int) -> float:
        """Slots that attention reads in the average step."""
        state = self.cache_state(kind, longest)
        # the cache of a growing rule has empty slots, which compiled loops do not read
        reads_empty = kind.cuda or kind.rule.growth == "fixed"
        return state.slots if reads_empty else state.read + 1

    # bytes that move

    def _copied(self, data: Offloaded) -> Amount:
        """What is copied between the host and the device."""
        return data.cpu + self._crosses * data.disk

    def weight_traffic(self, weights: Offloaded, tokens: int | None = None) -> Traffic:
        """`weights`: bytes in memory; a checkpoint of another type has fewer or more on disk. In decoder layers a pass
        of few `tokens` reads only some of the experts."""
        if tokens is not None:
            read = 1 - self._expert_share * (1 - read_share(self.shapes.spec, tokens))
            weights = Offloaded(read * weights.cpu, read * weights.disk)
        return Traffic(disk_to_cpu=self.shapes.stored_ratio * weights.disk, cpu_to_gpu=self._copied(weights))

    def _fetched(self, policy: Policy, sequences: Offloaded, nbytes: float) -> Traffic:
        """`nbytes` of each sequence to the device."""
        return _read(policy, sequences.disk, nbytes) + Traffic(cpu_to_gpu=self._copied(sequences) * nbytes)

    def _stored(self, policy: Policy, sequences: Offloaded, nbytes: float) -> Traffic:
        """`nbytes` of each sequence from the device."""
        return _write(policy, sequences.disk, nbytes) + Traffic(gpu_to_cpu=self._copied(sequences) * nbytes)

    # what runs at the same time

    def prefill(self, policy: Policy, batches: Sequence[Batch], part: Part) -> Flows:
        """The prompts of a block, in the layers of `part`."""
        longest = batches[0].longest
        cached_len = self.shapes.workload.cached_len

        def before(kind: Shapes) -> Traffic:
            return self._fetched(policy, part.cache, min(cached_len, kind.kv.slots) * kind.kv.row_bytes)

        def after(kind: Shapes) -> Traffic:
            slots = min(cached_len + kind.rule.cached_len(longest, longest), kind.kv.slots)
            return self._stored(policy, part.cache, slots * kind.kv.row_bytes)

        hidden = longest * self.hidden_bytes * self._stages
        compute = part.layers * self._prefill_compute(policy, batches, part.streamed)
        return Flows(
            compute + self.conversion(part.weights),
            self.weight_traffic(part.weights),
            activations_in=self._fetched(policy, part.activations, hidden),
            cache_in=self.shapes.mean(before),
            write_back=self._stored(policy, part.activations, hidden) + self.shapes.mean(after),
        )

    def decode(self, policy: Policy, batches: Sequence[Batch], part: Part) -> Flows:
        """A decode step of a block: the cache is read, one token is written back, and now and then a KV block on disk
        is compacted."""
        sizes = [batch.size for batch in batches]
        groups = matmul_rows(sizes, group_rows(self.shapes.spec))
        longest = batches[0].longest
        on_host = part.cache.cpu if policy.cpu_cache_compute else 0
        copied = self._copied(part.cache) - on_host
        context = self._crosses * on_host * self.hidden_bytes  # a query, a key or a value has about as many bytes

        matmuls = part.layers * self._matmuls(DECODER, Counter(groups), part.streamed)
        attention = self._decode_attention(longest, part.layers * sum(sizes) - on_host, on_host)
        decoding = self._decoding(DECODER, read_share(self.shapes.spec, sum(sizes)))
        dispatch = part.layers * (len(sizes) * self.profile.step_seconds + decoding)

        def staged(read: Amount, copied: Amount, kind: Shapes) -> Traffic:
            """Caches that are read from disk and copied to the device."""
            state = self.cache_state(kind, longest)
            row = kind.kv.row_bytes
            return _read(policy, read, state.read * row) + Traffic(cpu_to_gpu=copied * (state.slots * row))

        def written(kind: Shapes) -> Traffic:
            """The new tokens, and compactions."""
            state = self.cache_state(kind, longest)
            row = kind.kv.row_bytes
            new_token = _write(policy, part.cache.disk, row) + Traffic(gpu_to_cpu=copied * row + 3 * context)
            return new_token + _write(policy, part.cache.disk * state.compactions, state.compacted * row)

        buffered = part.layers * len(groups) * KV_BUFFERS * policy.gpu_batch_size
        return Flows(
            matmuls + attention + dispatch + self.conversion(part.weights),
            self.weight_traffic(part.weights, sum(sizes)),
            cache_in=self.shapes.mean(partial(staged, part.cache.disk, copied)) + Traffic(cpu_to_gpu=context),
            write_back=self.shapes.mean(written),
            matmuls=matmuls,
            cache_beside_matmuls=self.shapes.mean(partial(staged, buffered, buffered)),
        )

    def cache_state(self, kind: Shapes, longest: int) -> CacheState:
        """Of a sequence in a layer of a kind, in a block whose longest prompt has `longest` tokens."""
        steps = max(1, self.gen_len - 1)
        if kind.rule.growth == "fixed":  # compacted when the log is full
            slots = kind.kv.slots
            rows = wal_rows(kind.kv.segments)
            logged = min(rows, steps - 1) / 2
            return CacheState(slots, slots + logged, compactions=steps // (rows + 1) / steps, compacted=slots)
        # the log is the open segment, until that is full
        prompt, *segments = kind.rule.segments(longest, self.gen_len)
        ends = accumulate(segments, initial=prompt)
        closed_slots = sum(size * end for size, end in zip(segments, ends)) / steps
        open_slots = sum(size * size for size in segments) / steps
        compactions = max(0, len(segments) - 1) / steps
        return CacheState(closed_slots + open_slots, closed_slots + (open_slots - 1) / 2, compactions, open_slots)


def _matrices(layer: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in layer.items() if len(shape) > 1}


def _cut(total: int, most: int) -> Counter[int]:
    """`total` rows in parts of `most`: {rows of a part: how many such parts}."""
    full, rest = divmod(total, most)
    return Counter([most] * full + [rest] * int(rest > 0))


def _read(policy: Policy, sequences: Amount, nbytes: float) -> Traffic:
    """`nbytes` of each sequence from disk, one batch after the other."""
    return Traffic(disk_to_cpu=sequences * nbytes, reads=sequences * _requests_each(policy, nbytes))


def _write(policy: Policy, sequences: Amount, nbytes: float) -> Traffic:
    """`nbytes` of each sequence to disk, one batch after the other."""
    return Traffic(cpu_to_disk=sequences * nbytes, writes=sequences * _requests_each(policy, nbytes))


def _requests_each(policy: Policy, nbytes: float) -> float:
    """Disk requests per sequence."""
    batch = policy.gpu_batch_size
    return requests(ceil(batch * nbytes)) / batch
