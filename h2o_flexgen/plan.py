"""Bytes per tier of a policy, before anything is allocated. Pure Python over shapes: the memory check and the
policy search count with the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from h2o_flexgen.models.config import OPTConfig
from h2o_flexgen.placement import place_weights, spread
from h2o_flexgen.policy import Plan, Policy

PAGE = 4096
#: rows of logits that are turned into tokens at once
HEAD_ROWS = 128
#: attention over prompts: probabilities held at once (what stays in a processor's cache, or fills a GPU), and queries
#: of one chunk; measured on 2 cores in bf16, prompts of 64 to 2048 tokens: 256 queries are within 10 % of the best
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
QUERY_CHUNK = 256
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
    def of(cls, policy: Policy, layers: list[dict[str, tuple[int, ...]]], num_decoder: int, batches: int) -> Placement:
        """`layers`: {name: shape} of everything each layer needs, embedding first, head last."""
        matrices = [{n: prod(s) for n, s in layer.items() if len(s) > 1} for layer in layers]
        homes = {n: "gpu" for layer in layers for n, s in layer.items() if len(s) == 1}
        homes |= place_weights(matrices, policy.fractions("weights"))
        keys = [(layer, k) for layer in range(num_decoder) for k in range(batches)]
        cache = spread(keys, 1, policy.fractions("cache"))
        activations = spread(range(batches), 1, policy.fractions("activations"))
        return cls(homes, cache, [activations[k] for k in range(batches)])


@dataclass
class Shapes:
    """Everything about a model and a job that the plan counts with.

    Attributes:
        layers: {name: shape} per layer as for `Placement.of`.
        streamed: {name: shape} per layer of what is needed whole (the embedding only gathers rows).
        slots: KV slots per sequence and head; budget: heavy + recent, or None for a full cache.
        stored_itemsize: bytes per number in the checkpoint; compute_itemsize: in the computation.
    """

    config: OPTConfig
    layers: list[dict[str, tuple[int, ...]]]
    streamed: list[dict[str, tuple[int, ...]]]
    slots: int
    budget: int | None
    compute_itemsize: int
    stored_itemsize: int
    converts: bool
    cuda: bool
    dummy: bool = False
    log_rows: int = 0


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


def aligned(nbytes: int) -> int:
    """Up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def slot_span(nbytes: int) -> int:
    """Room for a tensor at any phase within a page, in whole pages."""
    return aligned(nbytes) + PAGE


def plan_memory(policy: Policy, shapes: Shapes, workload: Workload, placement: Placement, baseline: int) -> Plan:
    """The bytes a job needs on each tier at its peak.

    `baseline` is what the process holds already (interpreter and libraries), in bytes of RAM.
    """
    config, size = shapes.config, shapes.compute_itemsize
    plan = Plan(shared=not shapes.cuda)
    host = "cpu" if shapes.cuda else "gpu"  # whose RAM the process itself is counted to
    overlap = 2 if policy.overlap else 1
    batches = batch_sizes(len(workload.prompt_lens), policy)
    P = workload.longest

    plan.add(host, "the process itself", baseline)
    _plan_weights(plan, shapes, placement, overlap)
    _plan_cache(plan, policy, shapes, placement, batches, overlap)

    # hidden states
    E = config.hidden_size
    tokens = micro_tokens(policy, P, batches[0])
    piece = tokens * E * size
    for k, home in enumerate(placement.activations):
        plan.add(home, f"activations of batch {k}", max(batches[k] * P, batches[k]) * E * size)
    if any(home != "gpu" for home in placement.activations):
        plan.add("gpu", "activation buffers", overlap * max(piece, batches[0] * E * size))
        if shapes.cuda and "disk" in placement.activations:
            plan.add("cpu", "activation staging", 2 * piece)

    prefill = _prefill_workspace(shapes, tokens, P)
    decode = _decode_workspace(shapes, batches[0])
    head = min(batches[0], HEAD_ROWS) * config.vocab_size * (size + 8)
    plan.add("gpu", "workspace of a layer or the head", max(prefill, decode, head))
    return plan


def _plan_weights(plan: Plan, shapes: Shapes, placement: Placement, overlap: int) -> None:
    size = shapes.compute_itemsize
    every = {n: s for layer in shapes.layers for n, s in layer.items()}
    by_tier = {"gpu": 0, "cpu": 0, "disk": 0}
    for name, shape in every.items():
        by_tier[placement.weights[name]] += prod(shape) * size
    plan.add("gpu", "weights", by_tier["gpu"])
    plan.add("cpu", "weights", by_tier["cpu"])
    if shapes.dummy:  # a real checkpoint already lies on disk
        plan.add("disk", "random weights", by_tier["disk"])

    converts = shapes.converts or shapes.cuda
    slot = host = 0
    for layer in shapes.streamed:
        away = [prod(s) for n, s in layer.items() if placement.weights[n] != "gpu"]
        disk = [prod(s) for n, s in layer.items() if placement.weights[n] == "disk"]
        slot = max(slot, sum(slot_span(n * size) for n in away))
        host = max(host, sum(slot_span(n * shapes.stored_itemsize) for n in disk) if converts else 0)
    plan.add("gpu", "weight slots", overlap * slot)
    plan.add("cpu" if shapes.cuda else "gpu", "weight staging", overlap * host)
    if shapes.cuda and shapes.converts:  # a copy to CUDA changes its dtype there
        on_disk = [prod(s) for n, s in every.items() if placement.weights[n] == "disk"]
        plan.add("gpu", "weight conversion", max(on_disk, default=0) * shapes.stored_itemsize)


def _plan_cache(
    plan: Plan, policy: Policy, shapes: Shapes, placement: Placement, batches: list[int], overlap: int
) -> None:
    config, size = shapes.config, shapes.compute_itemsize
    scored = shapes.budget is not None
    row = 2 * config.hidden_size * size  # K and V of one token of one sequence
    meta = 8 * config.num_attention_heads * shapes.slots if scored else 0
    kv = {"gpu": 0, "cpu": 0, "disk": 0}
    metas = {"gpu": 0, "cpu": 0, "disk": 0}
    on_disk = 0
    for (_, k), home in placement.cache.items():
        rows = shapes.slots + (shapes.log_rows if home == "disk" else 0)
        kv[home] += batches[k] * rows * row
        metas["gpu" if home == "gpu" else "cpu"] += batches[k] * meta
        if home == "disk":
            on_disk = max(on_disk, batches[k])
    for tier in kv:
        plan.add(tier, "KV cache", kv[tier] + metas[tier])
    # with CPU attention prefill still fills a cache on the device
    buffers = max((batches[k] for (_, k), home in placement.cache.items() if home != "gpu"), default=0)
    plan.add("gpu", "KV buffers", overlap * buffers * (shapes.slots * row + meta))
    staging = on_disk * shapes.log_rows * row
    if shapes.cuda:
        staging += 2 * on_disk * shapes.slots * row
    if buffers:
        staging += buffers * row
    plan.add("cpu" if shapes.cuda else "gpu", "KV staging", staging)
    if shapes.cuda:
        plan.add("gpu", "KV log", on_disk * shapes.log_rows * row)


def _prefill_workspace(shapes: Shapes, tokens: int, P: int) -> int:
    config, size = shapes.config, shapes.compute_itemsize
    E, ffn = config.hidden_size, config.ffn_dim
    inner = ffn * _INNER_TENSORS.get(config.activation_function, 4)
    mlp = tokens * (3 * E + inner) * size
    attention = tokens * 7 * E * size
    if shapes.budget is not None:
        H = config.num_attention_heads
        # three copies in (B*H, T, D) shape; scores; the sort's keys and indices; the rows that are kept
        attention += tokens * 3 * E * size + tokens * H * (4 + 4 + 4 + 8)
        attention += tokens * E * size
        # a chunk of logits, and its probabilities in fp32 beside those of the chunk before
        queries = min(QUERY_CHUNK, P) * P
        attention += min(
            tokens * H * min(QUERY_CHUNK, P), max(CHUNK_ELEMENTS["cuda" if shapes.cuda else "cpu"], queries)
        ) * (size + 8)
    return max(mlp, attention)


def _decode_workspace(shapes: Shapes, batch: int) -> int:
    config, size = shapes.config, shapes.compute_itemsize
    scores = batch * config.num_attention_heads * shapes.slots
    return batch * (8 * config.hidden_size + 2 * config.ffn_dim) * size + scores * (4 * 4 + 2 * size)
