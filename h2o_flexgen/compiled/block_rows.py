"""Rows of weights in blocks of up to 6 bits, spread out to codes of 8 bits as `block_tiles` multiplies them, compiled
by numba: a segment of a few rows at a time, so that nothing else takes more than it does in the file.

    chunk    neighbouring codes of a row that share scale and minimum: 32, or 16 where groups are as small
    strip    LANES chunks
    segment  SEGMENT inputs. Its scales and minima become whole numbers of 16 bits, so that all sums in it are exact

A strip is spread out to 8 registers, or 4, which have a lane of 32 bits for each chunk:

                 lane 0        lane 1        ...
    register 0   codes 0-3     codes 0-3
    register 1   codes 4-7     codes 4-7           `arrange` puts x into the same order
    ...
    register 7   codes 28-31   codes 28-31
                 of chunk 0    of chunk 1    ...
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from h2o_flexgen.compiled import simd
from h2o_flexgen.compiled.blocks import NUMBERS, Scales, decode_scales, scales_of
from h2o_flexgen.compiled.floats import from_bits
from h2o_flexgen.compiled.simd import FLOAT, HAS_VNNI, I8, I16, I32, I64, IS_AVX512

#: whether this CPU has the instructions
IS_POSSIBLE = bool(simd.FEATURES.get("avx2"))
LANES = 16 if IS_AVX512 else 8
#: inputs whose scales become whole numbers together
SEGMENT = 2048
#: the whole number for the largest element that they can have
LARGEST = 8000
#: rows of a weight that are spread out at once: a segment of them, 128 KiB, stays in a core's cache
HEIGHT = 64
#: rows from the one being spread out to the one prefetched: parts of rows are too short for the CPU's own prefetching
_AHEAD = 4
#: bytes of a cache line
_LINE = 64
#: whether products are summed in 16 bits, two sums a lane
IS_PAIR = not HAS_VNNI
#: the largest sum of a lane in 16 bits
_MOST_SUM = 32767


class Kind(NamedTuple):
    """How a tile multiplies a strip: its registers, and how many of them are summed up before they are scaled."""

    registers: int
    together: int


#: of codes up to 15 and up to 31 in chunks of 32, and up to 63 in chunks of 16
KINDS = (Kind(8, 8), Kind(8, 4), Kind(4, 2)) if IS_PAIR else (Kind(8, 8), Kind(8, 8), Kind(4, 4))
#: codes of a chunk, by the index of the kind
CHUNKS = tuple(4 * kind.registers for kind in KINDS)


class Blocks(NamedTuple):
    """M weights (O, I) of one shape whose rows are blocks, as stored, each for some of the rows of x."""

    addresses: np.ndarray  # (M,) int64, of their bytes
    ends: np.ndarray  # (M,) int64, the end of each one's rows of x, which are behind those of the one before
    row_bytes: int
    stored: np.ndarray  # (O,) int64, the row in which each output is stored
    kind: int  # index into KINDS
    lowest: int  # code; the others are multiplied as what they are above it
    most: int  # what the highest code is above it


class Plan(NamedTuple):
    """How the segments of a row are read."""

    places: np.ndarray  # from `_places`
    last: np.ndarray  # likewise, of a last segment that is shorter
    masks: tuple  # of the lower part of a code, of the upper one, and the latter's left shift
    has_bits: bool  # the upper part is a bit of its own
    has_table: bool
    are_halves: bool  # the first 16 codes of each chunk and the others are in the same bytes; so it is with the above
    block: int  # elements
    scales: Scales


class Segment(NamedTuple):
    """Buffers for a segment of HEIGHT rows of a weight, of up to C chunks each."""

    codes: np.ndarray  # (HEIGHT, SEGMENT) uint8, spread out
    scale: np.ndarray  # (HEIGHT, C) int32, whole numbers; in both halves of 32 bits where sums are pairs
    minimum: np.ndarray  # (HEIGHT, C) int16, whole numbers
    unit: np.ndarray  # (HEIGHT,) float32, the value of 1 in these
    sums: np.ndarray  # (rows of a tile, HEIGHT) int32
    floats: np.ndarray  # (3, more than C) float32, the scales and minima of one row, and a buffer
    table: np.ndarray  # (16,) int8, what codes stand for above the lowest one
    numbers: np.ndarray  # (2, 8, NUMBERS) int32, the table of `blocks.Scales`


def kind_of(group: int, most: int) -> int | None:
    """Which of KINDS multiplies codes up to `most` with a scale for `group` of them; None: none of them does."""
    is_small = group < 4 * KINDS[0].registers
    for n, kind in enumerate(KINDS):
        fits = 2 * most * 127 * kind.together <= _MOST_SUM or not IS_PAIR
        if fits and group % (4 * kind.registers) == 0 and most <= 63 and is_small == (n == len(KINDS) - 1):
            return n
    return None


def _transposed(builder, chunks):
    """LANES vectors of 4 words as 4 vectors of LANES words."""
    vectors = [simd.concatenated(builder, chunks[n::4]) for n in range(4)]

    def of_quads(a, b, which):
        """In every four lanes those numbered `which`, counted through both vectors."""
        order = [q + n % 4 + n // 4 * LANES for q in range(0, LANES, 4) for n in which]
        return simd.lanes(builder, a, b, order)

    low = [of_quads(*vectors[n : n + 2], [0, 4, 1, 5]) for n in (0, 2)]
    high = [of_quads(*vectors[n : n + 2], [2, 6, 3, 7]) for n in (0, 2)]
    return [of_quads(*pair, which) for pair in (low, high) for which in ([0, 1, 4, 5], [2, 3, 6, 7])]


def _bits_apart(builder, words):
    """The lowest 16 bits of each word, a byte each, as 4 vectors of 4 bits of each."""

    def every(number):
        return simd.every(builder, I32(number), I32, LANES)

    found = []
    for n in range(4):
        four = builder.and_(builder.lshr(words, every(4 * n)), every(15))
        # bit n to bit 8n
        found.append(builder.and_(builder.mul(four, every(0x204081)), every(0x1010101)))
    return found


def _build_spread(kind, halves):
    """The LLVM IR of `_spread`."""

    def build(context, builder, signature, args):
        begin, places, target, masks, table = args
        mask, high_mask, left = (builder.extract_value(masks, n) for n in range(3))
        codes = ir.VectorType(I8, 4 * LANES)

        def listed(n, half):
            return [builder.add(places, I64(4 * ((4 * half + n) * LANES + lane))) for lane in range(LANES)]

        def read(n, half, count):
            """`count` words at each place in list n."""
            found = []
            for at in listed(n, half):
                place = builder.load(builder.inttoptr(at, I32.as_pointer()), align=1)
                found.append(simd.load(builder, builder.add(begin, builder.sext(place, I64)), I32, count))
            return found

        def shifted(words, n, half, mask):
            shift = simd.load(builder, listed(n, half)[0], I32, LANES)
            every = simd.every(builder, mask, I8, 4 * LANES)
            return [builder.and_(builder.bitcast(builder.lshr(each, shift), codes), every) for each in words]

        low = _transposed(builder, read(0, 0, 4))
        for half in range(halves):
            found = shifted(low, 1, half, mask)
            upper = []
            if kind == "bytes":
                upper = shifted(_transposed(builder, read(2, half, 4)), 3, half, high_mask)
            elif kind == "bits":
                upper = _bits_apart(builder, simd.concatenated(builder, read(2, half, 1)))
            for n, each in enumerate(upper):  # no bit leaves its byte
                words = builder.bitcast(each, low[n].type)
                high = builder.shl(words, simd.every(builder, left, I32, LANES))
                found[n] = builder.or_(found[n], builder.bitcast(high, codes))
            if kind == "table":
                entries = simd.load(builder, table, I8, 16)
                found = [simd.looked_up(builder, entries, each) for each in found]
            for n, each in enumerate(found):
                simd.store(builder, each, builder.add(target, I64((4 * half + n) * 4 * LANES)))

    return build


def _spread(kind, halves):
    @intrinsic
    def spread(_, begin, places, target, masks, table):
        """Spread out 16 codes of each chunk of a strip, 4 registers, or with two `halves` 32, whose lower parts are in
        the same bytes.

        Args:
            begin: address of the first block's bytes.
            places: address of an entry of `_places`, or of the first of two.
            target: address in `Segment.codes`.
            masks: of the lower part, of the upper one, and the latter's left shift.
            table: address of (16,) int8, for codes that are looked up.
        """
        return types.void(*[types.int64] * 3, masks, types.int64), _build_spread(kind, halves)

    return spread


_spread_low = _spread("low", 1)
_spread_bytes = _spread("bytes", 1)
_spread_halves = _spread("low", 2)
_spread_bits = _spread("bits", 2)
_look_up = _spread("table", 2)


@njit(nogil=True)
def _places(layout, size, chunks):
    """Where `chunks` chunks of `size` codes are in a row, behind the first block's first byte: for every 16 codes of a
    strip's chunks the bytes and shifts of the lower parts, and those of the upper ones, (., 4, LANES) int32. What is
    behind the last chunk is read from the first one, and not counted."""
    parts_of_chunk = size // 16
    places = np.zeros((-(-chunks // LANES) * parts_of_chunk, 4, LANES), np.int32)
    for n in range(len(places)):
        for lane in range(LANES):
            chunk = n // parts_of_chunk * LANES + lane
            if chunk < chunks:
                at = chunk * size + n % parts_of_chunk * 16
                block = at // layout.size * layout.nbytes
                run = at % layout.size // layout.run
                i = at % layout.size % layout.run
                bits = layout.codes[run]
                places[n, 0, lane] = block + bits[0] + i
                places[n, 1, lane] = bits[1]
                places[n, 2, lane] = block + bits[3] + (i // 8 if bits[7] == 8 else i)
                places[n, 3, lane] = bits[4]
    return places


@njit(nogil=True)
def plan_of(layout, size, row_bytes, table):
    """The `Plan` for rows of `row_bytes`, in chunks of `size` codes; table: for `blocks.scales_of`."""
    width = row_bytes // layout.nbytes * layout.size
    places = _places(layout, size, SEGMENT // size)
    last = _places(layout, size, width % SEGMENT // size)
    bits = layout.codes[0]
    masks = (bits[2], bits[5], bits[6])
    are_halves = size == 32 and np.all(places[::2, 0] == places[1::2, 0])
    scales = scales_of(layout, layout.size // size, table)
    return Plan(places, last, masks, bits[7] == 8, len(layout.table) > 0, are_halves, layout.size, scales)


@intrinsic
def _prefetch(_, address):
    """Begin to read the cache line at an address, which may be any."""

    def build(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], I8.as_pointer())
        simd.call(builder, "llvm.prefetch.p0i8", ir.VoidType(), pointer, *map(I32, (0, 3, 1)))

    return types.void(types.int64), build


def _scales_at(builder, addresses, c, count, lowest):
    """Of LANES chunks from chunk c on: scales, and minima as what the lowest code stands for; 0 from `count` on."""
    numbers = ir.Constant(ir.VectorType(I32, LANES), list(range(LANES)))
    is_chunk = builder.icmp_signed("<", numbers, simd.every(builder, builder.sub(count, c), I32, LANES))
    at = builder.mul(c, I64(4))
    floats = [simd.load(builder, builder.add(each, at), FLOAT, LANES) for each in addresses]
    scale, minimum = (builder.select(is_chunk, each, each.type(None)) for each in floats)
    return scale, builder.fadd(minimum, builder.fmul(simd.every(builder, lowest, FLOAT, LANES), scale))


def _call_float(builder, name, x):
    return simd.call(builder, f"llvm.{name}.v{LANES}f32", x.type, x)


@intrinsic
def _largest(_, scales, minima, count, bounds):
    """The bits of the largest absolute value of an element. scales, minima: addresses of `count` float32; bounds: the
    lowest code, and what the highest one is above it, float32."""

    def build(context, builder, signature, args):
        *addresses, count, bounds = args
        lowest, most = (builder.extract_value(bounds, n) for n in range(2))

        def larger(c, largest):
            scale, least = _scales_at(builder, addresses, c, count, lowest)
            highest = builder.fadd(least, builder.fmul(simd.every(builder, most, FLOAT, LANES), scale))
            for each in (least, highest):
                bits = builder.bitcast(_call_float(builder, "fabs", each), largest[0].type)
                is_larger = builder.icmp_unsigned(">", bits, largest[0])
                largest = [builder.select(is_larger, bits, largest[0])]
            return largest

        (found,) = simd.loop(builder, LANES, count, [ir.VectorType(I32, LANES)(None)], larger)
        return simd.call(builder, f"llvm.vector.reduce.umax.v{LANES}i32", I32, found)

    return types.uint32(*[types.int64] * 3, bounds), build


@intrinsic
def _round(_, scales, minima, count, bounds, factor, scale, minimum):
    """Write scales and minima times a factor, rounded, to addresses `scale` and `minimum`, with zeros up to a multiple
    of LANES. The others as for `_largest`."""

    def build(context, builder, signature, args):
        *addresses, count, bounds, factor, scale_at, minimum_at = args
        lowest, most = (builder.extract_value(bounds, n) for n in range(2))
        factor, half = (simd.every(builder, each, FLOAT, LANES) for each in (factor, builder.fmul(most, FLOAT(0.5))))
        whole = ir.VectorType(I32, LANES)

        def put(c, _):
            scale, least = _scales_at(builder, addresses, c, count, lowest)
            exact = builder.fmul(scale, factor)
            nearest = _call_float(builder, "rint", exact)
            # the minimum makes up for the rounding of the scale at the middle code
            least = builder.fadd(builder.fmul(least, factor), builder.fmul(half, builder.fsub(exact, nearest)))
            least = builder.fptosi(_call_float(builder, "rint", least), whole)
            least = builder.trunc(least, ir.VectorType(I16, LANES))
            simd.store(builder, least, builder.add(minimum_at, builder.mul(c, I64(2))))
            scale = builder.fptosi(nearest, whole)
            if IS_PAIR:
                low = builder.and_(scale, simd.every(builder, I32(0xFFFF), I32, LANES))
                scale = builder.or_(low, builder.shl(scale, simd.every(builder, I32(16), I32, LANES)))
            simd.store(builder, scale, builder.add(scale_at, builder.mul(c, I64(4))))
            return []

        simd.loop(builder, LANES, count, [], put)

    return types.void(*[types.int64] * 3, bounds, types.float32, types.int64, types.int64), build


@njit(nogil=True)
def new_segment(size, tall, table, lowest):
    """Buffers for chunks of `size` codes and tiles of `tall` rows. table: of `blocks.Arrays`; lowest: of `Blocks`."""
    return Segment(
        np.empty((HEIGHT, SEGMENT), np.uint8),
        np.empty((HEIGHT, SEGMENT // size), np.int32),
        np.empty((HEIGHT, SEGMENT // size), np.int16),
        np.empty(HEIGHT, np.float32),
        np.empty((tall, HEIGHT), np.int32),
        np.zeros((3, SEGMENT // size + NUMBERS), np.float32),
        (table - lowest).astype(np.int8),
        np.empty((2, 8, NUMBERS), np.int32),
    )


# with addresses instead of arrays of rows: numba counts references to each array
@njit(nogil=True)
def read(weight, plan, rows, begin, chunks, segment):
    """Read `chunks` chunks, from code `begin` on, of the rows at addresses `rows` (n,) int64 into the segment."""
    size = CHUNKS[weight.kind]
    places = plan.places if chunks == SEGMENT // size else plan.last
    scales = plan.scales
    skipped = begin // plan.block * scales.nbytes
    blocks = -(-chunks * size // plan.block)
    codes_at = segment.codes.ctypes.data
    scale_at = segment.scale.ctypes.data
    minimum_at = segment.minimum.ctypes.data
    floats_at = segment.floats.ctypes.data
    minima_at = floats_at + 4 * segment.floats.shape[1]
    buffer_at = minima_at + 4 * segment.floats.shape[1]
    table_at = segment.table.ctypes.data
    places_at = places.ctypes.data
    count = len(places)
    width = segment.scale.shape[1]
    masks = plan.masks
    bounds = np.float32(weight.lowest), np.float32(weight.most)
    for n in range(len(rows)):
        at = rows[n] + skipped
        target = codes_at + n * SEGMENT
        for line in range(0, blocks * scales.nbytes, _LINE):
            _prefetch(at + _AHEAD * weight.row_bytes + line)
        decode_scales(at, blocks, scales, buffer_at, floats_at, minima_at)
        if plan.has_table:
            for k in range(0, count, 2):
                _look_up(at, places_at + k * 16 * LANES, target + k * 16 * LANES, masks, table_at)
        elif plan.has_bits:
            for k in range(0, count, 2):
                _spread_bits(at, places_at + k * 16 * LANES, target + k * 16 * LANES, masks, table_at)
        elif masks[1]:
            for k in range(count):
                _spread_bytes(at, places_at + k * 16 * LANES, target + k * 16 * LANES, masks, table_at)
        elif plan.are_halves:
            for k in range(0, count, 2):
                _spread_halves(at, places_at + k * 16 * LANES, target + k * 16 * LANES, masks, table_at)
        else:
            for k in range(count):
                _spread_low(at, places_at + k * 16 * LANES, target + k * 16 * LANES, masks, table_at)
        largest = from_bits(_largest(floats_at, minima_at, chunks, bounds))
        factor = np.float32(LARGEST) / max(largest, np.float32(1e-30))
        targets = scale_at + 4 * n * width, minimum_at + 2 * n * width
        _round(floats_at, minima_at, chunks, bounds, factor, *targets)
        segment.unit[n] = largest / np.float32(LARGEST)
