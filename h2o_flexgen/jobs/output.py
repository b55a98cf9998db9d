"""Output files: JSON lines that survive a kill -9 and a full disk."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from h2o_flexgen import interrupts
from h2o_flexgen.errors import UserError

log = logging.getLogger(__name__)


class OutputFile:
    """The output file of a job: rows go to PATH.partial as they finish, and to PATH at the end (`open_output`).

    Attributes:
        rows: all that have finished; written: how many of them are in PATH.partial. The others wait for space on disk.
        file: PATH.partial, which this job has locked.

    Raises:
        UserError: PATH cannot be written, or another job writes it.
    """

    def __init__(self, path: str):
        if os.path.exists(path) and not os.path.isfile(path):
            raise UserError(f"`output_file` {path} is not a file")
        self.path = Path(os.path.realpath(path))  # of a link, what it points to is replaced
        self.partial = Path(f"{self.path}.partial")
        self.rows: list[dict] = []
        self.written = 0
        try:
            self.file = open(self.partial, "ab", buffering=0)
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.getsize(self.partial):
                _keep(self.partial, "rows of a job that was killed are kept in")
                self.file.truncate(0)
        except BlockingIOError:
            raise UserError(f"`output_file` {path}: another job is writing it") from None
        except OSError as e:
            raise UserError(f"`output_file` {path} cannot be written: {e.strerror}") from None

    def add(self, row: dict) -> None:
        self.rows.append(row)
        self.flush()

    def flush(self) -> None:
        """Write the rows that wait, if the disk takes them."""
        try:
            for row in self.rows[self.written :]:
                self._write(json.dumps(row).encode() + b"\n")
                self.written += 1
        except OSError as e:
            if self.written == len(self.rows) - 1:  # the first one that waits
                log.warning("cannot write %s: %s; the job goes on, its rows wait in memory", self.partial, e.strerror)

    def _write(self, line: bytes) -> None:
        size = self.file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self.file.write(line) :]
        except OSError:
            self.file.truncate(size)  # half a row is none
            raise

    def where(self) -> str:
        """For an error: how many rows are in the partial file. Those that wait are tried again: the offload folder,
        which may have taken the space, has gone."""
        self.flush()
        return f"{self.written} of {len(self.rows)} finished rows are in {self.partial}"

    def finish(self, whole: bool) -> None:
        """Put the finished rows in place, in the order of the input, if there are any.

        Args:
            whole: all rows are finished. If not, a file of an earlier job is kept under another name.

        Raises:
            UserError: the disk is full; the message says where the rows are.
        """
        if not self.rows:
            return
        new = Path(f"{self.path}.sorted")
        rows = sorted(self.rows, key=lambda row: row["index"])
        try:
            with interrupts.deferred():
                new.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
                if not whole and self.path.exists():
                    _keep(self.path, "the output file of an earlier job is kept in")
                os.replace(new, self.path)
                self.partial.unlink()
        except OSError as e:
            new.unlink(missing_ok=True)
            raise UserError(f"cannot write {self.path}: {e.strerror}; {self.where()}") from None


@contextmanager
def open_output(path: str) -> Iterator[OutputFile]:
    """The output file of a job. At the end, or on an interrupt, its rows are put in place; after another error PATH is
    as it was, the rows are in PATH.partial, and a UserError says so.

    Raises:
        UserError: as `OutputFile` and its `finish`.
    """
    output = OutputFile(path)
    try:
        yield output
    except (KeyboardInterrupt, BrokenPipeError):
        output.finish(whole=False)
        raise
    except UserError as e:
        if not output.rows:
            raise
        raise UserError(f"{e}; {output.where()}") from None
    else:
        output.finish(whole=True)
    finally:
        output.file.close()
        if not output.rows:
            output.partial.unlink(missing_ok=True)


def row_of(output) -> dict:
    """An output as a row of the output file."""
    if output.error is not None:
        return {"index": output.index, "error": output.error}
    done = output.outputs[0]
    return {"index": output.index, "text": done.text, "token_ids": done.token_ids, "finish_reason": done.finish_reason}


def _keep(path: Path, why: str) -> None:
    """Copy a file that will be overwritten; the copy has as many ~ at its end as make its name new."""
    kept = path
    while kept.exists():
        kept = Path(f"{kept}~")
    shutil.copyfile(path, kept)
    log.warning("%s %s", why, kept)
