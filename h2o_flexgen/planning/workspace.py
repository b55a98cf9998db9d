"""Peak bytes of device memory that computing one layer or the head takes, beside weights, cache and hidden states."""

from __future__ import annotations

from h2o_flexgen.formats import Int8
from h2o_flexgen.kernels.attention import CHUNK_ELEMENTS, QUERY_CHUNK, WIDENED_ELEMENTS, chunk_keys
from h2o_flexgen.kernels.exact import WIDEN_BYTES, WIDEN_ROWS
from h2o_flexgen.kernels.int8 import INT8_ROWS, may_tile
from h2o_flexgen.kernels.linear import always_tiles, slice_rows
from h2o_flexgen.planning.shapes import DECODER, HEAD, Shapes
from h2o_flexgen.planning.workload import HEAD_ROWS, SAMPLE_ROWS, group_rows, matmul_rows, micro_tokens
from h2o_flexgen.policy import Policy

#: sort workspace per logit, in bytes
SORTING = {"cpu": 30, "cuda": 50}
#: columns with outliers that an int8 matmul is planned with
OUTLIER_COLUMNS = 64

#: tensors of the MLP's inner width that an activation function holds at its peak; others, composed of many steps, hold
#: up to 4
_INNER_TENSORS = {"relu": 1, "gelu": 2, "silu": 2, "swish": 2}
#: bytes of a token and one of its experts: numbers and weights, as they come and in the experts' order
_ROUTED = 48
#: bytes per element of x in an int8 matmul: its code, and the operand made of it; on CUDA also what makes them
_CODES = {"tiles": 1 + 2, "floats": 1 + 4, "cuda": 18}
#: bytes per element of an int8 matmul's result: int32 sums as the kernel leaves them, the same contiguous, and fp32
_SUMS = 12


def workspace_bytes(
    policy: Policy, shapes: Shapes, longest: int, batches: list[int], cached_len: int = 0, has_head: bool = True
) -> int:
    """The most that a layer or the head takes, or, without `has_head`, a layer. `batches`: sequences of each batch, the
    largest first; `longest`: tokens of the longest prompt; `cached_len`: tokens that the caches already hold."""
    row_tokens = shapes.workload.row_tokens(policy, shapes.cuda)
    rows = max(matmul_rows(batches, group_rows(shapes.spec))) * row_tokens
    prefill = prefill_workspace(shapes, micro_tokens(policy.prefill_tokens, longest, batches[0]), longest, cached_len)
    return max(
        prefill,
        _decode_workspace(shapes, batches[0], rows),
        _head_workspace(shapes, sum(batches) * row_tokens) if has_head else 0,
    )


def prefill_workspace(shapes: Shapes, tokens: int, longest: int, cached_len: int = 0) -> int:
    """Bytes of a decoder layer for a micro-batch of `tokens` tokens, of prompts of up to `longest` tokens behind
    `cached_len` that the caches hold."""
    attention = shapes.most(lambda kind: _prefill_attention_bytes(kind, tokens, longest, cached_len))
    return max(_mlp_bytes(shapes, tokens), attention, _norm_bytes(shapes, tokens), _routing_bytes(shapes, tokens))


def _mlp_bytes(shapes: Shapes, tokens: int) -> int:
    """Hidden states, their norm and the sum, inner tensors, and what the matmuls take."""
    spec = shapes.spec
    inner = _inner(shapes) * (_INNER_TENSORS.get(spec.activation, 4) + spec.gated)
    matmul = max(_widened_bytes(shapes, tokens), _int8_bytes(shapes, tokens))
    return tokens * (3 * spec.hidden + inner) * shapes.itemsize + matmul


def _inner(shapes: Shapes) -> int:
    """The width of the widest MLP or expert."""
    spec = shapes.spec
    return max(spec.inner, spec.expert_inner, spec.shared_inner)


def _routing_bytes(shapes: Shapes, tokens: int) -> int:
    """In a layer of experts: hidden states, what experts read and zeros, the state that is made of the three, the
    router's answer, and tokens in the order of their experts."""
    spec = shapes.spec
    answer = spec.experts * (shapes.itemsize + 4) + spec.active * _ROUTED
    return tokens * (2 * spec.state_width * shapes.itemsize + answer) * (spec.experts > 0)


def _norm_bytes(shapes: Shapes, tokens: int) -> int:
    """Hidden states and their RMSNorm, and tensors in fp32 of a few rows."""
    elements = tokens * shapes.spec.hidden
    in_fp32 = min(elements, WIDENED_ELEMENTS[shapes.device]) * (8 + shapes.itemsize)
    return elements * 2 * shapes.itemsize + in_fp32


def _prefill_attention_bytes(shapes: Shapes, tokens: int, longest: int, cached_len: int) -> int:
    spec = shapes.spec
    size = shapes.itemsize
    Q = spec.query_width
    KV = spec.kv_width
    cached_tokens = tokens * cached_len // longest
    all_tokens = tokens * (longest + cached_len) // longest
    # hidden states, their norm and the sum; queries and the context; keys and values
    nbytes = tokens * (3 * spec.hidden + 2 * Q + 2 * KV) * size
    if shapes.rule.scores_prompt:
        nbytes += tokens * spec.kv_heads * _score_bytes(shapes)
    plain = shapes.rule.softmax.is_plain and not shapes.rule.scores_prompt
    # attention in chunks, at least on some CPUs and GPUs
    if not plain or shapes.may_widen or shapes.dtype == "bfloat16" or spec.groups > 1:
        # queries, keys and values by head, and the context; or the rows that are kept
        nbytes += tokens * (2 * Q + 2 * KV) * size
        nbytes += chunk_bytes(shapes, tokens, longest, cached_len)
        chunk_elements = _chunk_elements(shapes, tokens, longest, cached_len)
        # queries of a chunk, scaled too, and its context
        nbytes += 3 * chunk_elements * spec.head_dim // _chunk_keys(shapes, longest, cached_len) * size
        # cached K and V in the order of the text, the same with the new ones, and what is kept of both
        nbytes += 6 * cached_tokens * KV * size
    if shapes.rule.rope:  # rotated queries and keys
        nbytes += tokens * Q * size + all_tokens * KV * _rotating(shapes)
    if not shapes.kv_format.is_dense:  # heads side by side, quantised vectors, and those that are kept
        nbytes += tokens * KV * size + 2 * all_tokens * shapes.kv.row_bytes
    if shapes.may_widen:  # queries, keys, values and the context of a few heads in fp32
        rows = max(longest * spec.groups, CHUNK_ELEMENTS["cpu"] // min(QUERY_CHUNK["cpu"], longest))
        nbytes += 16 * spec.head_dim * min(tokens * spec.heads, rows)
    return nbytes


def _score_bytes(shapes: Shapes) -> int:
    """Of a prompt's token in one KV head: two scores in fp32, what else the rule remembers, the sort's key and index,
    and for votes these, the order of tokens and the pool."""
    metadata = dict(shapes.rule.metadata)
    remembered = sum(metadata[name].itemsize for name in metadata.keys() - {"score", "position"})
    votes = 4 + (1 + 8) if shapes.rule.has_votes else 0
    return 4 + 4 + remembered + 4 + 8 + votes


def chunk_bytes(shapes: Shapes, tokens: int, longest: int, cached_len: int = 0) -> int:
    """Logits of a chunk and, in fp32, their probabilities; one buffer for both if the logits are in fp32 too."""
    size = shapes.itemsize
    return _chunk_elements(shapes, tokens, longest, cached_len) * (4 + size * (size < 4))


def _chunk_elements(shapes: Shapes, tokens: int, longest: int, cached_len: int) -> int:
    """Logits of a chunk."""
    spec = shapes.spec
    chunk = min(QUERY_CHUNK[shapes.device], longest)
    keys = _chunk_keys(shapes, longest, cached_len)
    most = max(CHUNK_ELEMENTS[shapes.device], spec.groups * chunk * keys)
    return min(tokens * keys // longest * spec.heads * chunk, most)


def _chunk_keys(shapes: Shapes, longest: int, cached_len: int) -> int:
    """Keys that a chunk of queries is multiplied with."""
    chunk = min(QUERY_CHUNK[shapes.device], longest)
    return chunk_keys(chunk, longest + cached_len, shapes.rule.softmax.window, cached_len)


def _rotating(shapes: Shapes) -> int:
    """Bytes per element of a key while it is rotated: in fp32, with its sine or cosine, and in the computation's
    type."""
    return 8 + shapes.itemsize * (shapes.itemsize < 4)


def _widened_bytes(shapes: Shapes, rows: int) -> int:
    """Rows of x, and slices of the weight and of the result, that a matmul on the CPU widens to fp32 at once."""
    widest = max(_inner(shapes), shapes.spec.hidden)
    return (min(rows, WIDEN_ROWS) * widest * 4 + 2 * WIDEN_BYTES) * shapes.may_widen


def _int8_bytes(shapes: Shapes, rows: int, layer: int = DECODER) -> int:
    """What the largest int8 matmul of a layer takes: the codes of x, and the sums and floats of the result, which tiles
    never hold whole; where tiles do not cover the weight, a slice of it in floats. Outliers stay floats, and the
    weight's columns for them may become rows of x."""
    matrices = {name: shape for name, shape in shapes.multiplied(layer).items() if shapes.forms[name].in_int8}
    rows = min(rows, INT8_ROWS) + OUTLIER_COLUMNS
    tiles_only = bool(matrices) and not shapes.cuda and always_tiles()
    largest = 0
    for name, (height, width) in matrices.items():
        out = _slice_height(shapes, name) if layer == HEAD else height
        in_blocks = shapes.forms[name].operand != Int8()
        has_tiles = in_blocks or (not shapes.cuda and may_tile((height, width)))
        codes = _CODES["cuda" if shapes.cuda else "tiles" if has_tiles else "floats"]
        sums = 0 if in_blocks or (has_tiles and tiles_only) else _SUMS
        weight = 0 if has_tiles else WIDEN_BYTES
        largest = max(largest, rows * (codes * width + 4 * OUTLIER_COLUMNS + sums * out) + weight)
    return largest


def _head_workspace(shapes: Shapes, sequences: int) -> int:
    """Logits of the rows that go through the head at once, their hidden states, together and after the norm, the choice
    of tokens, and what the matmul takes."""
    rows = min(sequences * shapes.workload.logits, HEAD_ROWS)
    sampled = min(rows, SAMPLE_ROWS)
    logits = rows * shapes.itemsize + sampled * (4 + SORTING[shapes.device])  # of each token of the vocabulary
    hidden = 3 * rows * shapes.spec.hidden * shapes.itemsize
    return logits * shapes.spec.vocab + hidden + _sliced_bytes(shapes, rows) + _int8_bytes(shapes, rows, HEAD)


def _slice_height(shapes: Shapes, name: str) -> int:
    """Rows of a head's matrix that its matmul takes at once."""
    height, width = shapes.streamed[HEAD][name]
    form = shapes.forms[name]
    if form.is_direct:
        return height
    return min(height, slice_rows(width, 1 if form.in_int8 else shapes.itemsize))


def _sliced_bytes(shapes: Shapes, rows: int) -> int:
    """The decoded slice of a quantised head, and its part of the logits. In int8 the slice has the scales of its
    blocks, a quarter of a byte per element."""
    largest = 0
    for name, shape in shapes.streamed[HEAD].items():
        form = shapes.forms[name]
        if not form.is_direct:
            row = shape[1] * 5 // 4 + 4 if form.in_int8 else shape[1] * shapes.itemsize
            largest = max(largest, _slice_height(shapes, name) * (row + rows * shapes.itemsize))
    return largest


def _decode_workspace(shapes: Shapes, batch: int, rows: int) -> int:
    """Bytes of a decoder layer in a decode step. `rows` go through the matmuls together, `batch` of them through
    attention."""
    matmul = max(_widened_bytes(shapes, rows), _int8_bytes(shapes, rows))
    slots = shapes.most_slots
    return matmul + shapes.most(lambda kind: _decode_attention_bytes(kind, batch, rows, slots))


def _decode_attention_bytes(shapes: Shapes, batch: int, rows: int, slots: int) -> int:
    """Hidden states, inner tensors, queries, keys and values of `rows`, and attention over up to `slots` slots."""
    spec = shapes.spec
    size = shapes.itemsize
    inner = _inner(shapes) * (2 + spec.gated)
    tensors = rows * (4 * spec.hidden + 2 * spec.query_width + 2 * spec.kv_width + inner) * size
    # logits and probabilities; in fp32 also what slots receive, and what a rule compares
    attention = batch * spec.heads * slots * (4 * 4 + 2 * size)
    return tensors + attention + _cache_copy_bytes(shapes, batch, slots)


def _cache_copy_bytes(shapes: Shapes, batch: int, slots: int) -> int:
    """Copies of cached vectors of a few heads: in fp32, decoded, or rotated."""
    spec = shapes.spec
    quantised = not shapes.kv_format.is_dense
    per_element = 8 * (shapes.may_widen or quantised)
    if shapes.rule.rope:
        per_element += _rotating(shapes)
    if quantised and shapes.cuda:
        per_element += 2 * shapes.itemsize
    few = max(slots * spec.head_dim, WIDENED_ELEMENTS[shapes.device])
    return min(batch * spec.kv_width * slots, few) * per_element
