"""What tiles of matmuls (`tiles.py`, `tiles4.py`) and attention share of LLVM's language: CPU features, and vectors.

What numba keeps of a loop is dated by the file of that loop alone: after a change here, touch those that use it.
"""

from __future__ import annotations

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config

#: outputs of a tile
TILE_OUT = 4

# numba may have been told to compile for another CPU
_IS_HOST = config.ENABLE_AVX and config.CPU_NAME is None and config.CPU_FEATURES is None
FEATURES = get_host_cpu_features() if _IS_HOST else {}
IS_AVX512 = all(map(FEATURES.get, ("avx512vnni", "avx512vl", "avx512bw")))
HAS_VNNI = IS_AVX512 or FEATURES.get("avxvnni")


def call(builder, name, result, *args):
    """Of an intrinsic function."""
    kind = ir.FunctionType(result, [each.type for each in args])
    return builder.call(builder.module.declare_intrinsic(name, (), kind), args)


def multiply_pairs(builder, a, b):
    """16 bits times 16 bits, neighbours added up in 32 (vpmaddwd)."""
    name = {16: "llvm.x86.avx2.pmadd.wd", 32: "llvm.x86.avx512.pmaddw.d.512"}[a.type.count]
    return call(builder, name, ir.VectorType(ir.IntType(32), a.type.count // 2), a, b)


def add_codes(builder, total, unsigned, signed):
    """To sums in 32 bits, products of four neighbours of 8 bits each (vpdpbusd)."""
    # operands in int32, as LLVM has them up to 21; 22 has them in int8, and reads this form too
    operands = [builder.bitcast(each, total.type) for each in (unsigned, signed)]
    return call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * total.type.count}", total.type, total, *operands)


def loop(builder, step, end, totals, body):
    """From 0 on in steps until `end`, once at least: body(n, totals) -> totals, which are vectors. Returns the last."""
    i64 = ir.IntType(64)
    before = builder.block
    block = builder.append_basic_block()
    builder.branch(block)
    builder.position_at_end(block)
    n = builder.phi(i64)
    variables = [builder.phi(total.type) for total in totals]
    found = body(n, variables)
    following = builder.add(n, i64(step))
    for variable, first, then in [(n, i64(0), following), *zip(variables, totals, found)]:
        variable.add_incoming(first, before)
        variable.add_incoming(then, block)
    after = builder.append_basic_block()
    builder.cbranch(builder.icmp_unsigned("<", following, end), block, after)
    builder.position_at_end(after)
    return found


def lanes(builder, a, b, which):
    """Some lanes of 32 bits of two vectors, integers or floats, counted through both."""
    return builder.shuffle_vector(a, b, ir.VectorType(ir.IntType(32), len(which))(list(which)))


def add_up(builder, vectors):
    """The sum of each of several vectors, as one vector: halves of all are added until one lane of each is left."""
    width = vectors[0].type.count
    add = builder.fadd if vectors[0].type.element == ir.FloatType() else builder.add
    while width > 1:
        pairs = list(zip(vectors[::2], vectors[1::2])) or [(vectors[0], vectors[0])]
        every = range(vectors[0].type.count * min(2, len(vectors)))
        low, high = ([n for n in every if (n % width < width // 2) == is_low] for is_low in (True, False))
        vectors = [add(lanes(builder, *pair, low), lanes(builder, *pair, high)) for pair in pairs]
        width //= 2
    return vectors[0]


def addresses(builder, array, first, count):
    """Of `count` rows of an array of numba's, from `first` on."""
    i64 = ir.IntType(64)
    base = builder.ptrtoint(array.data, i64)
    step = builder.extract_value(array.strides, 0)
    return [builder.add(base, builder.mul(builder.add(first, i64(n)), step)) for n in range(count)]


def pointer(builder, address, element, count):
    """To a vector."""
    return builder.inttoptr(address, ir.VectorType(element, count).as_pointer())


def store_sums(builder, vectors, sums, at, rows):
    """Add up each of rows * TILE_OUT vectors, into the first rows of an array of numba's, of int32, from column `at`
    on."""
    i32 = ir.IntType(32)
    i64 = ir.IntType(64)
    found = add_up(builder, vectors)
    for n, row in enumerate(addresses(builder, sums, i64(0), rows)):
        few = lanes(builder, found, found, range(n * TILE_OUT, (n + 1) * TILE_OUT))
        place = builder.add(row, builder.mul(at, i64(4)))
        builder.store(few, pointer(builder, place, i32, TILE_OUT), align=4)
