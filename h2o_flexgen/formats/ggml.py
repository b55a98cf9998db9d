"""The types of GGUF files that are streamed as stored, byte for byte.

Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (blocks) and ggml-quants.c (their meaning). A new
type is one entry in `GGUF`.
"""

from __future__ import annotations

from h2o_flexgen.formats.blocks import Blocks
from h2o_flexgen.formats.layout import EXPONENT, Bits, Layout, Numbers, halves

#: what 4-bit codes stand for in IQ4_NL and IQ4_XS
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
#: likewise in MXFP4 (e2m1), times 2
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def planes(at: int, bits: int, each: int, high: int | None = None, high_bits: int = 0) -> tuple[tuple[Bits, ...], ...]:
    """Runs of 32 codes: of each `each` bytes the lowest `bits` bits of 32 bytes at a time, then the next ones.
    `high`: where their upper bits are, of all runs in turn, in the same 32 bytes as long as these last."""
    runs = []
    for n in range(256 // 32):
        per_part = each // 32 * (8 // bits)
        part, inside = divmod(n, per_part)
        level, column = divmod(inside, each // 32)
        low = Bits(at + part * each + 32 * column, bits * level, (1 << bits) - 1)
        if high is None:
            runs.append((low,))
            continue
        of_byte = 8 // high_bits
        runs.append((low, Bits(high + n // of_byte * 32, n % of_byte * high_bits, (1 << high_bits) - 1, bits)))
    return tuple(runs)


#: of Q4_K and Q5_K: 8 scales and 8 minima of 6 bits in 12 bytes, the second half of each in two parts
Q4_K_SCALES = Numbers(((Bits(4, mask=63),), (Bits(12, mask=15), Bits(4, 6, 3, 4))))
Q4_K_MINIMA = Numbers(((Bits(8, mask=63),), (Bits(12, 4, 15), Bits(8, 6, 3, 4))))
#: 16 of 6 bits less 32, in 12 bytes
Q3_K_SCALES = Numbers(
    tuple((Bits(96 + n % 2 * 4, n // 2 * 4, 15), Bits(104, 2 * n, 3, 4)) for n in range(4)), offset=32
)
#: 8 of 6 bits less 32: 4 bits of each, two in a byte, behind 2 bits of each, four in a byte
IQ4_XS_SCALES = Numbers(
    tuple((Bits(4 + n // 2, n % 2 * 4, 15), Bits(2 + n // 4, n % 4 * 2, 3, 4)) for n in range(8)), offset=32
)
Q2_K_SCALES = Numbers(((Bits(0, 0, 15),),))
Q2_K_MINIMA = Numbers(((Bits(0, 4, 15),),))
Q6_K_SCALES = Numbers(((Bits(192),),), is_signed=True)
IQ4_XS_CODES = Numbers(tuple(run for j in range(8) for run in halves(8 + 16 * j).bits), table=IQ4)

LAYOUTS = {
    "Q8_0": Layout(32, 34, Numbers(((Bits(2),),), is_signed=True), 32, 0),
    "Q4_0": Layout(32, 18, halves(2, offset=8), 32, 0),
    "Q4_1": Layout(32, 20, halves(4), 32, 0, minimum_at=2),
    "Q5_0": Layout(32, 22, halves(6, offset=16, high=2), 32, 0),
    "Q5_1": Layout(32, 24, halves(8, high=4), 32, 0, minimum_at=2),
    "Q2_K": Layout(256, 84, Numbers(planes(16, 2, 32)), 16, 80, minimum_at=82, scales=Q2_K_SCALES, minima=Q2_K_MINIMA),
    "Q3_K": Layout(256, 110, Numbers(planes(32, 2, 32, 0, 1), offset=4), 16, 108, scales=Q3_K_SCALES),
    "Q4_K": Layout(256, 144, Numbers(planes(16, 4, 32)), 32, 0, minimum_at=2, scales=Q4_K_SCALES, minima=Q4_K_MINIMA),
    "Q5_K": Layout(
        256, 176, Numbers(planes(48, 4, 32, 16, 1)), 32, 0, minimum_at=2, scales=Q4_K_SCALES, minima=Q4_K_MINIMA
    ),
    "Q6_K": Layout(256, 210, Numbers(planes(0, 4, 64, 128, 2), offset=32), 16, 208, scales=Q6_K_SCALES),
    "IQ4_NL": Layout(32, 18, halves(2, table=IQ4), 32, 0),
    "IQ4_XS": Layout(256, 136, IQ4_XS_CODES, 32, 0, scales=IQ4_XS_SCALES),
    "MXFP4": Layout(32, 17, halves(1, table=E2M1), 32, 0, scale_kind=EXPONENT),
}
#: by their names in GGUF
GGUF = {name: Blocks(name, layout) for name, layout in LAYOUTS.items()}
