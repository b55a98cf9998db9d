"""Loops that numba compiles for this CPU: several times as fast as the torch operators they replace (docs/formats.md).

They release the GIL, so threads can share the rows of a matrix (`threads.py`). LLVM vectorises them as long as their
lengths are unknown at compile time and indices are sums of unsigned integers (`U`). Floats come as `float_array` of
`threads.py` views them. A NamedTuple of arrays crosses from Python as a plain tuple: numba takes a microsecond a call
to recognise a NamedTuple, and next to nothing for a tuple.
"""

#: how a KV cache stores vectors: floats, or codes behind a scale in fp16 (int4: and a minimum in fp16)
FP32, FP16, BF16, INT8, INT4 = range(5)
