"""The bytes that computing a layer or the head takes on the device, at its peak."""

from __future__ import annotations

from h2o_flexgen.kernels.attention import CHUNK_ELEMENTS, QUERY_CHUNK
from h2o_flexgen.kernels.exact import WIDEN_BYTES, WIDEN_ROWS
from h2o_flexgen.kernels.int8 import INT8_ROWS, may_tile
from h2o_flexgen.kernels.linear import always_tiles, slice_rows
from h2o_flexgen.kernels.rowwise import WIDENED_ELEMENTS
from h2o_flexgen.planning.shapes import Shapes
from h2o_flexgen.planning.workload import HEAD_ROWS, SAMPLE_ROWS, matmul_rows, micro_tokens
from h2o_flexgen.policy import Policy

#: bytes for each logit that is sorted
SORTING = {"cpu": 30, "cuda": 50}
#: columns with outliers that a matmul in int8 is planned with
OUTLIER_COLUMNS = 64

#: a transformer block, which stands for all, and the head, among the layers
_DECODER = -2
_HEAD = -1
#: tensors of the inner width that an activation function holds at its peak; others, composed of many steps, up to 4
_INNER_TENSORS = {"relu": 1, "gelu": 2, "silu": 2, "swish": 2}
#: bytes of an element of x as codes, and as a matmul in int8 takes these; on CUDA with what makes them
_CODES = {"tiles": 1 + 2, "floats": 1 + 4, "cuda": 18}
#: bytes of an element of its result where it holds the sums: as they come, as they are used, and as floats
_SUMS = 12


def workspace_bytes(policy: Policy, shapes: Shapes, longest: int, batches: list[int], cached_len: int = 0) -> int:
    """What computing a layer or the head takes on the device, for batches of these sizes, the largest first, of
    prompts of up to `longest` tokens, behind `cached_len` that caches hold."""
    prefill = prefill_workspace(shapes, micro_tokens(policy.prefill_tokens, longest, batches[0]), longest, cached_len)
    rows = max(matmul_rows(batches))
    decode = _decode_workspace(shapes, batches[0], rows)
    chosen = min(rows, SAMPLE_ROWS) * (4 + SORTING[shapes.device])
    few = min(rows, HEAD_ROWS)
    head = (
        (few * shapes.itemsize + chosen) * shapes.spec.vocab
        + _sliced_bytes(shapes, few)
        + _int8_bytes(shapes, few, _HEAD)
    )
    return max(prefill, decode, head)


def prefill_workspace(shapes: Shapes, tokens: int, P: int, cached_len: int = 0) -> int:
    """Bytes of a micro-batch of `tokens` tokens, of prompts of up to `P` behind `cached_len` that caches hold, in one
    transformer block."""
    spec = shapes.spec
    size = shapes.itemsize
    E = spec.hidden
    Q = spec.query_width
    KV = spec.kv_width
    inner = spec.inner * (_INNER_TENSORS.get(spec.activation, 4) + spec.gated)
    mlp = tokens * (3 * E + inner) * size + max(_widened_bytes(shapes, tokens), _int8_bytes(shapes, tokens))
    # hidden states, normed, and the sum; queries, keys, values, and the context
    attention = tokens * (3 * E + 2 * Q + 2 * KV) * size
    # RMSNorm's tensors in fp32, of a few rows
    norm = tokens * E * 2 * size + min(tokens * E, WIDENED_ELEMENTS[shapes.device]) * (8 + size)
    if shapes.rule.scores_prompt:
        metadata = dict(shapes.rule.metadata)
        remembered = sum(metadata[name].itemsize for name in metadata.keys() - {"score", "position"})
        # scores, and what else is remembered; the sort's keys and indices
        attention += tokens * spec.kv_heads * (4 + remembered + 4 + 4 + 8)
    # attention by chunks, at least on some CPUs and GPUs
    if shapes.rule.scores_prompt or shapes.may_widen or shapes.dtype == "bfloat16" or spec.groups > 1:
        # three copies in (B * KV, G * T, D) shape, and the context; or the rows that are kept
        attention += tokens * (2 * Q + 2 * KV) * size
        attention += chunk_bytes(shapes, tokens, P, cached_len)
        # queries and context of the chunk
        attention += 3 * _chunk_elements(shapes, tokens, P, cached_len) * spec.head_dim // (P + cached_len) * size
        # K and V in the order of the text, with the new ones, and again of those that stay
        attention += 6 * (tokens * cached_len // P) * KV * size
    if shapes.rule.rope:
        attention += tokens * Q * size + tokens * (P + cached_len) // P * KV * _rotating(shapes)
    if not shapes.kv_format.is_dense:  # heads side by side, as they are stored, and those that stay
        attention += tokens * KV * size + 2 * (tokens * (P + cached_len) // P) * shapes.kv.row_bytes
    if shapes.may_widen:  # queries, keys, values and the context of a few heads
        few = max(P * spec.groups, CHUNK_ELEMENTS["cpu"] // min(QUERY_CHUNK["cpu"], P))
        attention += 16 * spec.head_dim * min(tokens * spec.heads, few)
    return max(mlp, attention, norm)


def chunk_bytes(shapes: Shapes, tokens: int, P: int, cached_len: int = 0) -> int:
    """Logits of a chunk and, in float32, their probabilities; one buffer for both if the logits are in float32 too."""
    size = shapes.itemsize
    return _chunk_elements(shapes, tokens, P, cached_len) * (4 + size * (size < 4))


def _chunk_elements(shapes: Shapes, tokens: int, P: int, cached_len: int) -> int:
    chunk = min(QUERY_CHUNK[shapes.device], P)
    spec = shapes.spec
    keys = P + cached_len
    most = max(CHUNK_ELEMENTS[shapes.device], spec.groups * chunk * keys)
    return min(tokens * keys // P * spec.heads * chunk, most)


def _rotating(shapes: Shapes) -> int:
    """Bytes of a key's element while it is rotated: in float32, with its sine or cosine, and as it is used."""
    return 8 + shapes.itemsize * (shapes.itemsize < 4)


def _widened_bytes(shapes: Shapes, tokens: int) -> int:
    """Of a matmul's operands and its result, what is in float32 at once."""
    widest = max(shapes.spec.inner, shapes.spec.hidden)
    return (min(tokens, WIDEN_ROWS) * widest * 4 + 2 * WIDEN_BYTES) * shapes.may_widen


def _int8_bytes(shapes: Shapes, rows: int, layer: int = _DECODER) -> int:
    """Of a matmul in int8: the codes of x; the sums and floats of the result, which tiles never hold whole; where these
    do not cover the weight, a slice of it in floats. Outliers stay floats, and the weight's columns of them may be rows
    of x."""
    matrices = {name: shape for name, shape in shapes.streamed[layer].items() if shapes.in_int8(name)}
    if not matrices:
        return 0
    rows = min(rows, INT8_ROWS) + OUTLIER_COLUMNS
    sizes = []
    tiles_only = not shapes.cuda and always_tiles()
    for name, shape in matrices.items():
        out = _slice(shapes, name) if layer == _HEAD else shape[0]
        in_blocks = shapes.reads_blocks(name)
        has_tiles = in_blocks or (not shapes.cuda and may_tile(shape))
        each = _CODES["cuda" if shapes.cuda else "tiles" if has_tiles else "floats"]
        sums = 0 if in_blocks or (has_tiles and tiles_only) else _SUMS
        sizes.append(rows * (each * shape[1] + 4 * OUTLIER_COLUMNS + sums * out) + WIDEN_BYTES * (not has_tiles))
    return max(sizes)


def _slice(shapes: Shapes, name: str) -> int:
    """Rows of a head's matrix that its matmul takes at once."""
    height, width = shapes.streamed[_HEAD][name]
    if shapes.read_as_kept(name):
        return height
    return min(height, slice_rows(width, 1 if shapes.in_int8(name) else shapes.itemsize))


def _sliced_bytes(shapes: Shapes, rows: int) -> int:
    """Of a quantised head, a slice that is decoded, and its part of the logits. In int8 with the scales of its blocks,
    a quarter of a byte for each element."""
    sizes = [0]
    for name, shape in shapes.streamed[_HEAD].items():
        if not shapes.read_as_kept(name):
            row = shape[1] * 5 // 4 + 4 if shapes.in_int8(name) else shape[1] * shapes.itemsize
            sizes.append(_slice(shapes, name) * (row + rows * shapes.itemsize))
    return max(sizes)


def _decode_workspace(shapes: Shapes, batch: int, rows: int) -> int:
    """`rows` go through the matmuls together, `batch` of them through attention."""
    spec = shapes.spec
    size = shapes.itemsize
    slots = shapes.most_slots
    scores = batch * spec.heads * slots
    # a few heads in float32, or rotated
    few = max(slots * spec.head_dim, WIDENED_ELEMENTS[shapes.device])
    quantised = not shapes.kv_format.is_dense
    copies = 8 * (shapes.may_widen or quantised) + (_rotating(shapes) if shapes.rule.rope else 0)
    copies += 2 * size * (quantised and shapes.cuda)
    cache = min(batch * spec.kv_width * slots, few) * copies
    inner = spec.inner * (2 + spec.gated)
    matmuls = rows * (4 * spec.hidden + 2 * spec.query_width + 2 * spec.kv_width + inner) * size
    return matmuls + max(_widened_bytes(shapes, rows), _int8_bytes(shapes, rows)) + cache + scores * (4 * 4 + 2 * size)
