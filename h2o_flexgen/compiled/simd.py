"""LLVM IR that matmuls (`tiles.py`, `block_tiles.py`) and attention share: CPU features, loops and vectors.

Numba's cache goes by the date of a loop's own file: after a change here, touch the files that use it.
"""

from __future__ import annotations

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config

I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
FLOAT = ir.FloatType()

#: outputs of a tile
TILE_OUT = 4

# numba can be configured to compile for another CPU
_IS_HOST = config.ENABLE_AVX and config.CPU_NAME is None and config.CPU_FEATURES is None
FEATURES = get_host_cpu_features() if _IS_HOST else {}
IS_AVX512 = all(map(FEATURES.get, ("avx512vnni", "avx512vl", "avx512bw")))
HAS_VNNI = IS_AVX512 or FEATURES.get("avxvnni")


def call(builder, name, result, *args):
    """Call an LLVM intrinsic by its name."""
    kind = ir.FunctionType(result, [each.type for each in args])
    return builder.call(builder.module.declare_intrinsic(name, (), kind), args)


def multiply_pairs(builder, a, b):
    """Products of 16 bits by 16 bits, neighbours added up in 32 (vpmaddwd)."""
    name = {16: "llvm.x86.avx2.pmadd.wd", 32: "llvm.x86.avx512.pmaddw.d.512"}[a.type.count]
    return call(builder, name, ir.VectorType(I32, a.type.count // 2), a, b)


def add_codes(builder, total, unsigned, signed):
    """Add the products of four neighbours of 8 bits to each sum in 32 bits (vpdpbusd)."""
    # LLVM up to 21 wants the operands in int32; 22 wants int8, and accepts int32 too
    operands = [builder.bitcast(each, total.type) for each in (unsigned, signed)]
    return call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * total.type.count}", total.type, total, *operands)


def loop(builder, step, end, totals, body):
    """Emit a loop for n from 0 to `end` by `step`, run at least once: body(n, totals) -> totals, vectors. Returns the
    last totals."""
    before = builder.block
    block = builder.append_basic_block()
    builder.branch(block)
    builder.position_at_end(block)
    n = builder.phi(I64)
    variables = [builder.phi(total.type) for total in totals]
    found = body(n, variables)
    following = builder.add(n, I64(step))
    for variable, first, then in [(n, I64(0), following), *zip(variables, totals, found)]:
        variable.add_incoming(first, before)
        variable.add_incoming(then, block)
    after = builder.append_basic_block()
    builder.cbranch(builder.icmp_unsigned("<", following, end), block, after)
    builder.position_at_end(after)
    return found


def lanes(builder, a, b, which):
    """The lanes numbered `which`, of 32 bits, counted through both vectors, integers or floats."""
    return builder.shuffle_vector(a, b, ir.VectorType(I32, len(which))(list(which)))


def looked_up(builder, entries, which):
    """entries[n] of 16 bytes for each n in a vector of 16, or of 32 or 64 by AVX2 or AVX-512."""
    count = which.type.count
    order = ir.Constant(ir.VectorType(I32, count), [n % 16 for n in range(count)])
    entries = builder.shuffle_vector(entries, entries, order)
    if FEATURES.get("ssse3"):
        name = {16: "ssse3.pshuf.b.128", 32: "avx2.pshuf.b", 64: "avx512.pshuf.b.512"}[count]
        return call(builder, f"llvm.x86.{name}", which.type, entries, which)
    found = which.type(ir.Undefined)
    for n in range(count):
        entry = builder.extract_element(entries, builder.zext(builder.extract_element(which, I32(n)), I32))
        found = builder.insert_element(found, entry, I32(n))
    return found


def concatenated(builder, vectors):
    """Several vectors, one behind the other, as one."""
    while len(vectors) > 1:
        every = range(2 * vectors[0].type.count)
        vectors = [lanes(builder, *pair, every) for pair in zip(vectors[::2], vectors[1::2])]
    return vectors[0]


def add_up(builder, vectors):
    """The sum of each of several vectors, in one vector: their halves are added until one lane of each is left."""
    width = vectors[0].type.count
    add = builder.fadd if vectors[0].type.element == FLOAT else builder.add
    while width > 1:
        width //= 2
        pairs = list(zip(vectors[::2], vectors[1::2])) or [(vectors[0], vectors[0])]
        every = range(vectors[0].type.count * min(2, len(vectors)))
        low = [n for n in every if n // width % 2 == 0]
        high = [n for n in every if n // width % 2 == 1]
        vectors = [add(lanes(builder, *pair, low), lanes(builder, *pair, high)) for pair in pairs]
    return vectors[0]


def every(builder, number, element, count):
    """A whole number in each of `count` elements of a vector."""
    kind = ir.VectorType(element, count)
    number = number if number.type == element else builder.trunc(number, element)
    first = builder.insert_element(kind(ir.Undefined), number, I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, count), [0] * count))


def addresses(builder, array, first, count):
    """The addresses of `count` rows of a numba array, from row `first` on."""
    base = builder.ptrtoint(array.data, I64)
    step = builder.extract_value(array.strides, 0)
    return [builder.add(base, builder.mul(builder.add(first, I64(n)), step)) for n in range(count)]


def load(builder, address, element, count):
    """The vector of `count` elements at an address of any alignment."""
    return builder.load(builder.inttoptr(address, ir.VectorType(element, count).as_pointer()), align=1)


def store(builder, vector, address):
    """Write a vector to an address of any alignment."""
    builder.store(vector, builder.inttoptr(address, vector.type.as_pointer()), align=1)


def store_sums(builder, vectors, sums, at, rows):
    """Write the sum of each of rows * TILE_OUT vectors to a numba array of int32, from column `at` on."""
    found = add_up(builder, vectors)
    for n, row in enumerate(addresses(builder, sums, I64(0), rows)):
        few = lanes(builder, found, found, range(n * TILE_OUT, (n + 1) * TILE_OUT))
        store(builder, few, builder.add(row, builder.mul(at, I64(4))))
