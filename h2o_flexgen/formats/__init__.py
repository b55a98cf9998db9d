"""How tensors are laid out in bytes, one format per file. Only this package and the compiled loops know bits.

    Dense(dtype)        floats, one after another
    Int8()              an fp32 scale for every row of a matrix, then its int8 codes
    Int4(group)         blocks along a row: fp16 scale and minimum of a group, then its codes of 4 bits (as Q4_1)
    GGUF[name]          blocks of 32 or 256 elements, byte for byte as in the file

A code stands for code * scale + minimum. A scale and a minimum belong to one row, or to a group of neighbours in a row,
so that any row can be read and decoded alone.
"""

from h2o_flexgen.formats.base import Format, Shape
from h2o_flexgen.formats.blocks import Blocks, Codes8, Int4
from h2o_flexgen.formats.cache import KVFormat
from h2o_flexgen.formats.dense import Dense, convert, dtype_name
from h2o_flexgen.formats.ggml import GGUF
from h2o_flexgen.formats.int8 import Int8
from h2o_flexgen.formats.matrix import Quantised, decode_bytes
from h2o_flexgen.formats.prepare import prepare

__all__ = ["GGUF", "Blocks", "Codes8", "Dense", "Format", "Int4", "Int8", "KVFormat", "Quantised", "Shape"]
__all__ += ["convert", "decode_bytes", "dtype_name", "prepare"]
