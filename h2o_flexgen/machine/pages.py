"""Pages of memory, which direct disk requests are made of. Pure Python."""

from __future__ import annotations

#: bytes of a page of memory, which direct disk requests are made of
PAGE = 4096


def aligned(nbytes: int) -> int:
    """Up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def staging_span(nbytes: int) -> int:
    """Room for a tensor at any phase within a page, in whole pages."""
    return aligned(nbytes) + PAGE
