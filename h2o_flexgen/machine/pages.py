"""Pages of memory, which direct disk requests are made of."""

from __future__ import annotations

#: bytes of a page
PAGE = 4096


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def staging_span(nbytes: int) -> int:
    """Bytes of the whole pages that hold a tensor wherever in a page it begins."""
    return aligned(nbytes) + PAGE
