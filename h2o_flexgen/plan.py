"""Bytes per tier of a policy, before anything is allocated. Pure Python over shapes: the memory check and the
policy search count with the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, prod

from h2o_flexgen.models.config import OPTConfig
from h2o_flexgen.placement import place_weights, spread
from h2o_flexgen.policy import Plan, Policy

PAGE = 4096
#: a disk request; larger ones are read no faster, smaller ones cost processor time (docs/benchmarks/disk.json)
REQUEST, LEAST_REQUEST = 4 << 20, 1 << 20
#: that keep the disk's queue full
THREADS = 4
#: the most pieces of a streaming cache on the device at once
KV_SLOTS = 3
#: slots by which a full cache grows behind the prompt: an eighth of what it holds, in multiples of the least. What is
#: still empty in the last segment is attended to like the rest, and every segment takes two more products.
SEGMENT, LARGEST_SEGMENT = 32, 128
#: bytes of a generated token, in Python: a number, its logprob, and their places in two lists
TOKEN = 72
#: micro-batches whose hidden states may be on their way home at once
HOMEWARD = 2
#: rows that go through the head at once, and of their logits those that are turned into tokens at once
HEAD_ROWS, SAMPLE_ROWS = 128, 16
#: bytes for each logit that is sorted
SORTING = {"cpu": 30, "cuda": 50}
#: rows that go through the products of a decode step together, if their batches are smaller: the rate of products grows
#: up to about so many (the README has it)
GROUP_ROWS = 128
#: attention over prompts: probabilities held at once (what stays in a processor's cache, or fills a GPU), and queries
#: of one chunk; measured on 2 cores in bf16, prompts of 64 to 2048 tokens: 256 queries are within 10 % of the best
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
QUERY_CHUNK = 256
#: bytes of weights and rows of tokens in float32 at once, on a processor that multiplies nothing narrower
PRODUCT_SLICE, PRODUCT_ROWS = 4 << 20, 512
#: tensors of the inner width that an activation function holds at its peak; others, composed of many steps, up to 4
_INNER_TENSORS = {"relu": 1, "gelu": 2, "silu": 2, "swish": 2}


@dataclass(frozen=True)
class Workload:
    """What a job asks for: prompt lengths in tokens, longest first, and the output length."""

    prompt_lens: tuple[int, ...]
    gen_len: int

    @property
    def longest(self) -> int:
        return self.prompt_lens[0]

    @property
    def output_bytes(self) -> int:
        """RAM that the outputs hold to the job's end."""
        return TOKEN * len(self.prompt_lens) * self.gen_len


@dataclass
class Placement:
    """Homes of all pieces under a policy.

    Attributes:
        weights: tier by tensor name; vectors (biases, norms: 0.03 % of the bytes) stay on the compute device.
        cache: tier by (decoder layer, batch).
        activations: tier by batch.
    """

    weights: dict[str, str]
    cache: dict[tuple[int, int], str]
    activations: list[str]

    @classmethod
    def of(
        cls,
        policy: Policy,
        layers: list[dict[str, tuple[int, ...]]],
        num_decoder: int,
        batches: int,
        weights: dict[str, str] | None = None,
    ) -> Placement:
        """`layers`: {name: shape} of everything each layer needs, embedding first, head last. `weights`: their homes,
        if they are known from another policy with the same percentages."""
        if weights is None:
            matrices = [{n: prod(s) for n, s in layer.items() if len(s) > 1} for layer in layers]
            weights = {n: "gpu" for layer in layers for n, s in layer.items() if len(s) == 1}
            weights |= place_weights(matrices, policy.fractions("weights"))
        keys = [(layer, k) for layer in range(num_decoder) for k in range(batches)]
        cache = spread(keys, policy.fractions("cache"))
        activations = spread(range(batches), policy.fractions("activations"))
        return cls(weights, cache, [activations[k] for k in range(batches)])


@dataclass
class Shapes:
    """Everything about a model and a job that the plan counts with.

    Attributes:
        layers: {name: shape} per layer as for `Placement.of`.
        streamed: {name: shape} per layer of what is needed whole (the embedding only gathers rows).
        segments: KV slots per sequence and head, by segment; budget: heavy + recent, or None for a full cache.
        stored_itemsize: bytes per number in the checkpoint; compute_itemsize: in the computation; bf16: whether that
            is in bf16.
    """

    config: OPTConfig
    layers: list[dict[str, tuple[int, ...]]]
    streamed: list[dict[str, tuple[int, ...]]]
    segments: tuple[int, ...]
    budget: int | None
    compute_itemsize: int
    stored_itemsize: int
    converts: bool
    cuda: bool
    bf16: bool
    dummy: bool = False

    @property
    def slots(self) -> int:
        return sum(self.segments)

    @property
    def log_rows(self) -> int:
        return log_rows(self.segments)

    @property
    def row_bytes(self) -> int:
        """K and V of one token of one sequence in one layer."""
        return 2 * self.config.hidden_size * self.compute_itemsize

    @property
    def meta_bytes(self) -> int:
        """Scores and positions of one sequence in one layer."""
        return 8 * self.config.num_attention_heads * self.slots if self.budget is not None else 0

    @property
    def piece_bytes(self) -> int:
        """The cache of one sequence in one layer."""
        return self.slots * self.row_bytes + self.meta_bytes

    @property
    def converts_by_compute(self) -> bool:
        """Whether weights from disk lie on the device as they are stored, and compute converts a layer to use it."""
        return self.converts and not self.cuda

    @property
    def may_widen(self) -> bool:
        """Whether products go through float32 where the processor has none in 16 bits (cpu.py)."""
        return not self.cuda and self.compute_itemsize == 2

    @property
    def stored_ratio(self) -> float:
        """Bytes in the checkpoint per byte of the computation."""
        return self.stored_itemsize / self.compute_itemsize

    @classmethod
    def of(cls, config: OPTConfig, layers: list, rule, workload: Workload, **sizes) -> Shapes:
        """`layers` as a model lists them (`models.opt.layers`), `rule` as in kv_cache; `sizes` are the other fields."""
        return cls(
            config=config,
            layers=[dict((*layer.streamed.values(), *layer.gathered.values())) for layer in layers],
            streamed=[dict(layer.streamed.values()) for layer in layers],
            segments=rule.segments(workload.longest, workload.gen_len),
            budget=rule.budget if rule.scored else None,
            **sizes,
        )


def full_segments(prompt_len: int, gen_len: int) -> tuple[int, ...]:
    """Slots of a full cache, by segment: the prompt's, and what it grows by."""
    sizes, left = [prompt_len], gen_len - 1  # the last token is never attended to
    while left > 0:
        size = max(SEGMENT, sum(sizes) // 8 // SEGMENT * SEGMENT)
        sizes.append(min(size, LARGEST_SEGMENT, left))
        left -= sizes[-1]
    return tuple(sizes)


def log_rows(segments: Sequence[int]) -> int:
    """Tokens the log of a cache piece on disk holds. A cache that grows is folded by whole segments. One that does not
    is written anew: reading n/2 rows a step and writing slots/n balance at sqrt(2 slots)."""
    return max(segments[1:], default=max(1, isqrt(2 * segments[0])))


def kv_slots(overlap: bool, on_disk: bool) -> int:
    """Buffers through which pieces of a cache visit the device: one that is used, and one that comes or leaves; where
    they come from disk one more, so that it has something to read while the products of a layer use none."""
    if not overlap:
        return 1
    return KV_SLOTS if on_disk else 2


def micro_tokens(policy: Policy, longest: int, batch: int) -> int:
    """The most tokens, padding included, of a prefill micro-batch of prompts of up to `longest` tokens; a single
    sequence may exceed `policy.prefill_tokens`."""
    return max(longest, min(policy.prefill_tokens, batch * longest))


def batch_sizes(num_prompts: int, policy: Policy) -> list[int]:
    """Sequences per batch of the first, largest block."""
    left = min(num_prompts, policy.block_size)
    sizes = []
    while left > 0:
        sizes.append(min(left, policy.gpu_batch_size))
        left -= sizes[-1]
    return sizes


def product_groups(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Which batches of so many sequences go through the products of a decode step together: (begin, end) of each group,
    of one batch or of at most GROUP_ROWS sequences. One group of more rows saves compute less than it costs: fewer
    pieces of cache come beside the products."""
    groups, rows = [], 0
    for n, size in enumerate(sizes):
        if groups and rows + size <= GROUP_ROWS:
            groups[-1] = groups[-1][0], n + 1
            rows += size
        else:
            groups.append((n, n + 1))
            rows = size
    return groups


def product_rows(sizes: Sequence[int]) -> list[int]:
    """Sequences of each group."""
    return [sum(sizes[begin:end]) for begin, end in product_groups(sizes)]


def prefill_pairs(length: int) -> int:
    """Pairs of query and key that attention over a prompt computes for one head: chunks of queries, each over all
    keys up to its end."""
    ends = [min(begin + QUERY_CHUNK, length) for begin in range(0, length, QUERY_CHUNK)]
    return sum((end - begin) * end for begin, end in zip([0, *ends], ends))


def aligned(nbytes: int) -> int:
    """Up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def disk_span(segments: Sequence[int], row: int) -> int:
    """Bytes on disk of a cache piece of so many slots, `row` bytes each, and of its log: the piece and every row of the
    log take whole pages, as direct reads and writes want them."""
    return aligned(sum(segments) * row) + log_rows(segments) * aligned(row)


def request_bytes(nbytes: int, most: int = REQUEST, threads: int = THREADS) -> int:
    """How large the requests are in which so many bytes are read or written: cut so that every thread has a part, but
    not smaller than LEAST_REQUEST."""
    return min(most, max(LEAST_REQUEST, aligned(-(-nbytes // threads))))


def requests(nbytes: int) -> int:
    """How many requests that is."""
    return -(-nbytes // request_bytes(nbytes))


def slot_span(nbytes: int) -> int:
    """Room for a tensor at any phase within a page, in whole pages."""
    return aligned(nbytes) + PAGE


def plan_memory(policy: Policy, shapes: Shapes, workload: Workload, placement: Placement, baseline: int) -> Plan:
    """The bytes a job needs on each tier at its peak.

    `baseline` is what the process holds whatever it computes (interpreter and libraries), in bytes of RAM.
    """
    size = shapes.compute_itemsize
    plan = Plan(shared=not shapes.cuda)
    host = "cpu" if shapes.cuda else "gpu"  # whose RAM the process itself is counted to
    overlap = 2 if policy.overlap else 1
    batches = batch_sizes(len(workload.prompt_lens), policy)
    P = workload.longest

    plan.add(host, "the process itself", baseline)
    plan.add(host, "generated tokens", workload.output_bytes)
    _plan_weights(plan, shapes, placement, overlap)
    _plan_cache(plan, policy, shapes, placement, batches)

    # hidden states
    E = shapes.config.hidden_size
    tokens = micro_tokens(policy, P, batches[0])
    piece = tokens * E * size
    for k, home in enumerate(placement.activations):
        plan.add(home, f"activations of batch {k}", batches[k] * P * E * size)
    plan.add("gpu", "activations of a decode step", sum(batches) * E * size)
    if any(home != "gpu" for home in placement.activations):
        plan.add("gpu", "activation buffers", overlap * piece)
        plan.add("gpu", "activations on their way home", HOMEWARD * piece * policy.overlap)
        if shapes.cuda and "disk" in placement.activations:
            plan.add("cpu", "activation staging", 2 * piece)

    plan.add("gpu", "workspace of a layer or the head", workspace_bytes(policy, shapes, P, batches))
    return plan


def plan_policy(
    policy: Policy,
    shapes: Shapes,
    workload: Workload,
    limits: dict[str, int],
    baseline: int,
    workspace: int,
    weights: dict[str, str] | None = None,
) -> tuple[Placement, Plan]:
    """Where everything goes under a policy, and the bytes it takes against the limits. `workspace`: bytes of the device
    that its libraries hold; `weights` as for `Placement.of`, the rest as for `plan_memory`."""
    batches = len(batch_sizes(len(workload.prompt_lens), policy))
    placement = Placement.of(policy, shapes.layers, shapes.config.num_hidden_layers, batches, weights)
    plan = plan_memory(policy, shapes, workload, placement, baseline)
    plan.add("gpu", "workspace of matrix products", workspace)
    plan.limits = limits
    return placement, plan


def workspace_bytes(policy: Policy, shapes: Shapes, longest: int, batches: list[int]) -> int:
    """What computing a layer or the head takes on the device, for batches of so many prompts, the largest first, of up
    to `longest` tokens."""
    prefill = _prefill_workspace(shapes, micro_tokens(policy, longest, batches[0]), longest)
    rows = max(product_rows(batches))
    decode = _decode_workspace(shapes, batches[0], rows)
    chosen = min(rows, SAMPLE_ROWS) * (4 + SORTING["cuda" if shapes.cuda else "cpu"])
    head = (min(rows, HEAD_ROWS) * shapes.compute_itemsize + chosen) * shapes.config.vocab_size
    return max(prefill, decode, head)


def _plan_weights(plan: Plan, shapes: Shapes, placement: Placement, overlap: int) -> None:
    size = shapes.compute_itemsize
    every = {n: s for layer in shapes.layers for n, s in layer.items()}
    by_tier = {"gpu": 0, "cpu": 0, "disk": 0}
    for name, shape in every.items():
        by_tier[placement.weights[name]] += prod(shape) * size
    plan.add("gpu", "weights", by_tier["gpu"])
    plan.add("cpu", "weights", by_tier["cpu"])
    if shapes.dummy:  # a real checkpoint already lies on disk
        plan.add("disk", "random weights", by_tier["disk"] * shapes.stored_ratio)

    in_place = shapes.stored_itemsize if shapes.converts_by_compute else size  # read into the slot
    slot = host = converted = 0
    for layer in shapes.streamed:
        cpu, disk = ([prod(s) for n, s in layer.items() if placement.weights[n] == tier] for tier in ("cpu", "disk"))
        slot = max(slot, sum(slot_span(n * size) for n in cpu) + sum(slot_span(n * in_place) for n in disk))
        host = max(host, sum(slot_span(n * shapes.stored_itemsize) for n in disk))
        converted = max(converted, sum(aligned(n * size) for n in disk))
    plan.add("gpu", "weight slots", overlap * slot)
    if shapes.cuda:
        plan.add("cpu", "weight staging", overlap * host)
        on_disk = [prod(s) for n, s in every.items() if placement.weights[n] == "disk"]
        converted = max(on_disk, default=0) * shapes.stored_itemsize  # a copy to CUDA changes its dtype there
    if shapes.converts:
        plan.add("gpu", "weight conversion", converted)


def _plan_cache(plan: Plan, policy: Policy, shapes: Shapes, placement: Placement, batches: list[int]) -> None:
    row, meta = shapes.row_bytes, shapes.meta_bytes
    kv = {"gpu": 0, "cpu": 0, "disk": 0}
    metas = {"gpu": 0, "cpu": 0, "disk": 0}
    on_disk = 0
    for (_, k), home in placement.cache.items():
        size = batches[k] * row
        kv[home] += disk_span(shapes.segments, size) if home == "disk" else shapes.slots * size
        metas["gpu" if home == "gpu" else "cpu"] += batches[k] * meta
        if home == "disk":
            on_disk = max(on_disk, batches[k])
            # the slots of the log's rows
            heads = 1 if shapes.budget is None else shapes.config.num_attention_heads
            metas["cpu"] += batches[k] * shapes.log_rows * heads * 4
    for tier in kv:
        plan.add(tier, "KV cache", kv[tier] + metas[tier])
    # with CPU attention prefill still fills a cache on the device
    buffers = max((batches[k] for (_, k), home in placement.cache.items() if home != "gpu"), default=0)
    slots = kv_slots(policy.overlap, on_disk > 0)
    piece, landing = buffers * shapes.slots * row, disk_span(shapes.segments, on_disk * row)
    if shapes.cuda:
        plan.add("gpu", "KV slots", slots * (piece + buffers * meta))
        plan.add("cpu", "KV staging", slots * landing + on_disk * shapes.slots * row)
    else:
        plan.add("gpu", "KV slots", slots * max(piece, landing))
    plan.add("cpu" if shapes.cuda else "gpu", "KV staging of a step", buffers * row)
    if buffers:  # each may hold those of its group
        plan.add("gpu", "keys and values on their way home", slots * max(product_rows(batches)) * row)


def _prefill_workspace(shapes: Shapes, tokens: int, P: int) -> int:
    config, size = shapes.config, shapes.compute_itemsize
    E, ffn = config.hidden_size, config.ffn_dim
    inner = ffn * _INNER_TENSORS.get(config.activation_function, 4)
    mlp = tokens * (3 * E + inner) * size + _widened(shapes, tokens)
    attention = tokens * 7 * E * size
    H = config.num_attention_heads
    if shapes.budget is not None:
        attention += tokens * H * (4 + 4 + 4 + 8)  # scores; the sort's keys and indices
    if shapes.budget is not None or shapes.may_widen or shapes.bf16:  # by chunks, at least on some processors and cards
        # three copies in (B*H, T, D) shape, and the context; or the rows that are kept
        attention += tokens * 4 * E * size
        attention += _chunk_of_attention(shapes, tokens, P)
    if shapes.may_widen:  # queries, keys, values and the product of a few heads
        attention += 16 * config.head_dim * min(tokens * H, max(P, CHUNK_ELEMENTS["cpu"] // min(QUERY_CHUNK, P)))
    return max(mlp, attention)


def _chunk_of_attention(shapes: Shapes, tokens: int, P: int) -> int:
    """Logits and, in float32, their probabilities; one buffer for both where the logits are in float32 too."""
    chunk = min(QUERY_CHUNK, P)
    most = max(CHUNK_ELEMENTS["cuda" if shapes.cuda else "cpu"], chunk * P)
    size = shapes.compute_itemsize
    return min(tokens * shapes.config.num_attention_heads * chunk, most) * (4 + size * (size < 4))


def _widened(shapes: Shapes, tokens: int) -> int:
    """Of a product's operands and its result, what is in float32 at once."""
    return (min(tokens, PRODUCT_ROWS) * shapes.config.ffn_dim * 4 + 2 * PRODUCT_SLICE) * shapes.may_widen


def _decode_workspace(shapes: Shapes, batch: int, rows: int) -> int:
    """`rows` go through the products together."""
    config, size = shapes.config, shapes.compute_itemsize
    scores = batch * config.num_attention_heads * shapes.slots
    cache = 8 * min(scores * config.head_dim, 2 * CHUNK_ELEMENTS["cpu"]) * shapes.may_widen  # a few heads in float32
    products = rows * (8 * config.hidden_size + 2 * config.ffn_dim) * size + _widened(shapes, rows)
    return products + cache + scores * (4 * 4 + 2 * size)
