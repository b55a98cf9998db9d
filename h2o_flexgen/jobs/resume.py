"""What earlier runs of a job have done, and what is left of it.

Rows are known by the hashes of their ids. Of 64 bits, two may be the same: such rows are never taken for one another,
but run again.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.input import count_each, id_hash
from h2o_flexgen.jobs.output import DoneRow, Failures, line_at, moved, no_row, open_done, read_done


class Done:
    """The rows of an output file, which stay there: what is kept of each takes 17 bytes.

    Attributes:
        ids: (N,) uint64, `id_hash` of each; offsets: where they begin; failed: (N,) bool.
        tokens: that all have generated.

    Raises:
        UserError: the file cannot be read, or a line is no row.
    """

    def __init__(self, path: Path):
        self.path = path
        self.file = open_done(path)
        self.state = self._state()
        ids = array("Q")
        self.offsets = array("q")
        failed = array("B")
        self.tokens = 0
        for offset, row in read_done(path, self.file):
            ids.append(id_hash(row.id))
            self.offsets.append(offset)
            failed.append(row.error is not None)
            self.tokens += row.tokens
        self.ids = np.array(ids, np.uint64)
        self.failed = np.array(failed, bool)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def mean_len(self) -> float | None:
        """Tokens of the average output; None if there is none."""
        count = len(self) - int(self.failed.sum())
        return self.tokens / count if count else None

    def check(self, known: np.ndarray) -> None:
        """Raises UserError for a row whose id has none of the hashes `known`, (M,) uint64, or is there twice."""
        bad = np.flatnonzero(count_each(self.ids, known) == 0)[:1].tolist()
        seen = set()
        for n in np.flatnonzero(count_each(self.ids, self.ids) > 1):
            id = self.row(n).id
            if id in seen:
                bad.append(int(n))
                break
            seen.add(id)
        if bad:
            raise no_row(self.path, min(bad) + 1)

    def row(self, n: int) -> DoneRow:
        return DoneRow.of(json.loads(line_at(self.file, self.offsets[n])))

    def lines(self, left: Left) -> Iterator[tuple[int, bytes]]:
        """(index, line) of the rows that stay, in the order of the input.

        Raises:
            UserError: the file has been written since it was read.
        """
        if self._state() != self.state:
            raise UserError(f"`output_file` {self.path} was edited while the job began: start the job again")
        for n, index in zip(left.kept, map(int, left.indices)):
            yield index, moved(line_at(self.file, self.offsets[n]), index)

    def failures(self, left: Left) -> Failures:
        """Of the rows that stay."""
        failed = left.kept[self.failed[left.kept]]
        found = Failures()
        for n in failed[:1]:
            row = self.row(n)
            found.note(row.id, row.error)
        found.count = len(failed)
        return found

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self.file.fileno())
        return found.st_size, found.st_mtime_ns

    def close(self) -> None:
        self.file.close()


@dataclass(frozen=True)
class Left:
    """What is left of a job of N rows.

    Attributes:
        todo: (N,) bool, the rows that are run.
        kept: (K,) places among the `Done` of those that stay, in the order of the input; indices: (K,) of their rows.
        dropped: how many finished rows go, as their input has changed or gone.
        remarks: how many rows of the input are others than before, in words.
    """

    todo: np.ndarray
    kept: np.ndarray
    indices: np.ndarray
    dropped: int = 0
    remarks: str = ""


def all_of(count: int) -> Left:
    """A job that begins, with so many rows."""
    none = np.empty(0, np.int64)
    return Left(np.ones(count, bool), none, none)


def left_of(old: np.ndarray, done: Done, new: np.ndarray, retry_errors: bool) -> Left:
    """What is left of a job that began with the rows `old`, and now has `new`; both (N, 2), as `Rows.known`."""
    before = places(new[:, 0], old[:, 0])
    is_known = before >= 0
    is_changed = is_known & (old[before, 1] != new[:, 1])
    index = places(done.ids, new[:, 0])
    # both have the digest of the row when it was done, unless it has changed since
    is_same = (index >= 0) & is_known[index] & ~is_changed[index]
    again = is_same & done.failed & retry_errors
    kept = np.flatnonzero(is_same & ~again)
    kept = kept[np.argsort(index[kept])]
    todo = np.ones(len(new), bool)
    todo[index[kept]] = False
    counts = {
        "were changed and run again": is_changed.sum(),
        "are new": (~is_known).sum(),
        "failed and run again": again.sum(),
        "are no longer in the input": (count_each(old[:, 0], new[:, 0]) == 0).sum(),
    }
    remarks = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return Left(todo, kept, index[kept], len(done) - int(is_same.sum()), remarks)


def places(wanted: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(N,) int64, where each of `wanted`, (N,), stands among `values`, (M,): -1 if it does not, or more than once."""
    order = np.argsort(values)
    at = np.minimum(np.searchsorted(values, wanted, sorter=order), len(values) - 1)
    return np.where(count_each(wanted, values) == 1, order[at], -1)
