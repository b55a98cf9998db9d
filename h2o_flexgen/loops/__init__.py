"""Loops compiled for this CPU by numba: several times as fast as a few torch operators (docs/formats.md).

They release the GIL, so that threads can share the rows of a matrix (`threads.py`). So that loops are vectorised, their
lengths are not known when they are compiled, and what is added up to an index is unsigned (`U`). Arrays of floats are
those of `threads.float_array`.
"""
