"""A KV block on disk with its write-ahead log: a decode step appends one row, and writes nothing else.

    offset                            offset + aligned(kv_bytes)
    |                                 |
    | K and V, by segments | not used | row 0 | row 1 | ...   | row wal_rows - 1 |
    |<----- `written` ---->|          |<-- `rows` --->|

A row is one token of each sequence, first all K, then all V, in whole pages; its slots stay in RAM. Reading the block
reads K and V and the rows, and replays the rows in order.

Compaction rewrites K and V and empties the log. A cache that grows is compacted whenever its last segment in use is
full, starting at the first segment that the log has changed: so a step reads the tokens that the cache holds and no
empty slot. A cache of fixed size is compacted when the log is full: by then reading rows has cost as much as writing K
and V.

Where a sequence takes a place, its part of K and V is written, in whole pages. These also hold parts of its neighbours,
as new as what the log replays over them. The log's tokens of the sequence that had the place before become void.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import numpy as np
from torch import Tensor

from h2o_flexgen.kv_cache.layout import KVLayout
from h2o_flexgen.machine.pages import PAGE, aligned
from h2o_flexgen.storage.disk import DiskIO, File, wait


def file_bytes(layout: KVLayout) -> int:
    """Bytes on disk of a KV block and its log. K and V, and every row, take whole pages, which direct requests need."""
    return aligned(layout.kv_bytes) + wal_rows(layout.segments) * aligned(layout.row_bytes)


def slots_bytes(layout: KVLayout) -> int:
    """RAM for the slots of a full log, int32."""
    return 4 * wal_rows(layout.segments) * layout.batch * layout.heads


class LoggedBlock:
    """One KV block in `file` from `offset` on. Calls return when their reads or writes have ended."""

    def __init__(self, io: DiskIO, file: File, offset: int):
        self.io = io
        self.file = file
        self.offset = offset

    def begin(self, layout: KVLayout) -> None:
        """Start with an empty cache of this layout."""
        self.layout = layout
        self.written = 0  # bytes of K and V in the file, the log aside
        self.rows = 0  # tokens per sequence in the log
        self._slots = np.empty((wal_rows(layout.segments), layout.batch, layout.heads), np.int32)  # -1: void
        self._log_begin = aligned(layout.kv_bytes)
        self._row_bytes = aligned(layout.row_bytes)

    def is_due(self, cached_len: int) -> bool:
        """Whether the next step, which leaves `cached_len` slots in use, compacts the block instead of appending."""
        # no segment begins behind the last one: its rows may stay in the log
        return self.rows == len(self._slots) or cached_len in self.layout.ends[:-1]

    def dirty(self, cached_len: int, slots: Tensor | None = None) -> slice:
        """The bytes that `compact` has to write with `cached_len` slots in use. `slots`: those of the newest token, if
        the file holds all others; None if it holds nothing."""
        begin = 0
        if slots is not None and self.layout.growth == "append":  # on the CPU
            logged = self._slots[: self.rows]
            first = int(logged.min(initial=int(slots.min()), where=logged >= 0))
            begin = min(self.layout.bytes_before(first), self.written) // PAGE * PAGE
        return slice(begin, self.layout.used_bytes(cached_len))

    def append(self, row: np.ndarray, slots: np.ndarray) -> None:
        """Log a token of each sequence: its bytes, in whole pages, and its slots (B, H)."""
        wait(self.io.write(self.file, row, self.offset + self._log_begin + self.rows * self._row_bytes, True))
        self._slots[self.rows] = slots
        self.rows += 1

    def changed(self, places: list[int], count: int, used: int) -> list[tuple[int, int]]:
        """Void the log's tokens of the sequences that had `places` before. Returns the (begin, end) of the pages that
        `write` must write for those that took them, with the first `count` places and `used` bytes of K and V in
        use."""
        self._slots[: self.rows, places] = -1
        self._slots[: self.rows, count:] = -1
        spans = [span for place in places for span in self.layout.row_spans(place, used)]
        if used > self.written:  # a segment whose tokens are all in the log
            spans.append((self.written, used))
        self.written = used
        pages = []
        for begin, end in sorted(spans):
            begin = begin // PAGE * PAGE
            end = aligned(end)
            if pages and begin <= pages[-1][1]:
                begin = pages[-1][0]
                end = max(end, pages.pop()[1])
            pages.append((begin, end))
        return pages

    def write(self, kv: np.ndarray, pages: list[tuple[int, int]]) -> None:
        """Write whole pages of K and V."""
        requests = [self.io.write(self.file, kv[begin:end], self.offset + begin, True) for begin, end in pages]
        wait([request for each in requests for request in each])

    def compact(self, kv: np.ndarray, part: slice) -> None:
        """Write a page-aligned `part` of K and V, which ends with those in use, and empty the log."""
        self.write(kv, [(part.start, aligned(part.stop))])
        self.written = part.stop
        self.rows = 0

    def read(self, buffer: np.ndarray, used: int) -> None:
        """Fill the first `used` bytes of `buffer`, which has room for the log too, with K and V."""
        written = aligned(self.written)
        log_end = self._log_begin + self.rows * self._row_bytes
        spans = [(0, written), (self._log_begin, log_end)] if written < self._log_begin else [(0, log_end)]
        reads = [self.io.read(self.file, buffer[a:b], self.offset + a, True) for a, b in spans]
        wait([read for each in reads for read in each])
        kv = buffer[:used]
        kv[self.written :] = 0  # a segment whose tokens are all in the log
        if self.rows:
            rows = buffer[self._log_begin : log_end].reshape(self.rows, -1)[:, : self.layout.row_bytes]
            slots = self._slots[: self.rows]
            # the other slots are those of longer sequences, which have ended
            self.layout.put(kv, rows, np.where(slots < self.layout.slots_within(used), slots, -1))


def wal_rows(segments: Sequence[int]) -> int:
    """Tokens per sequence that the write-ahead log of a KV block holds. A cache that grows is compacted by whole
    segments, one of fixed size all at once: reading n/2 rows a step and writing slots/n balance at sqrt(2 slots)."""
    return max(segments[1:], default=max(1, isqrt(2 * segments[0])))
