"""Loops compiled for this CPU by numba: several times as fast as a few torch operators (docs/formats.md).

They release the GIL, so that threads can share the rows of a matrix (`threads.py`). So that loops are vectorised, their
lengths are not known when they are compiled, and what is added up to an index is unsigned (`U`). Arrays of floats are
those of `threads.float_array`.
"""

#: how vectors of a KV cache are stored: floats, or codes behind a scale of fp16, those of 4 bits behind a minimum too
FP32, FP16, BF16, INT8, INT4 = range(5)
