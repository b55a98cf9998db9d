"""Output files: JSON lines that survive a kill -9 and a full disk."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from h2o_flexgen.errors import UserError
from h2o_flexgen.files import check_writable, is_held

log = logging.getLogger(__name__)


class OutputFile:
    """The output file of a job.

    Rows go to PATH.partial as they finish. At the end, or on an interrupt, PATH is put in place whole and in the order
    of the input. So a killed job leaves the rows that it had, and an error leaves PATH as it was. Rows that a full disk
    does not take wait in memory.

    Attributes:
        rows: what has finished, by index; waiting: of these, lines that are not written yet.
        file: PATH.partial while it is open.

    Raises:
        UserError: PATH cannot be written, or another job writes it.
    """

    def __init__(self, path: str):
        check_writable("`output_file`", Path(path))
        if os.path.exists(path) and not os.path.isfile(path):
            raise UserError(f"`output_file` {path} is not a file")
        self.path = Path(os.path.realpath(path))  # of a link, what it points to is replaced
        self.partial = self.path.with_name(self.path.name + ".partial")
        self._check_free()
        self.rows: dict[int, dict] = {}
        self.waiting: dict[int, bytes] = {}
        self.file = None
        self._warned = self._whole = False

    def _check_free(self) -> None:
        if is_held(self.partial):
            raise UserError(f"`output_file` {self.path}: another job is writing it")

    def add(self, row: dict) -> None:
        self.rows[row["index"]] = row
        self.waiting[row["index"]] = json.dumps(row).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write the rows that wait, if the disk takes them."""
        if not self.waiting:
            return
        try:
            if self.file is None:
                self._check_free()
                self._set_aside(self.partial, "rows of a job that was killed are kept in")
                self.file = open(self.partial, "wb", buffering=0)
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for index in list(self.waiting):
                self._write(self.waiting[index])
                del self.waiting[index]
        except OSError as e:
            if not self._warned:
                log.warning("cannot write %s: %s; the job goes on, its rows wait in memory", self.partial, e.strerror)
            self._warned = True

    def _write(self, line: bytes) -> None:
        size = self.file.tell()
        try:
            if self.file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self.file.truncate(size)  # half a row is none
            self.file.seek(size)
            raise

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Inside, a job adds its rows; at the end they are put in place. After an interrupt those that there are, too;
        after an error they stay in the partial file, and an error of the user says so."""
        try:
            yield
            self.finish(whole=True)
        except (KeyboardInterrupt, BrokenPipeError):
            self.finish(whole=False)
            raise
        except UserError as e:
            if self.rows and str(self.partial) not in str(e):
                raise UserError(f"{e}; {self.where()}") from None
            raise
        except Exception:
            self.flush()  # the offload folder, which may have taken the space, has gone
            raise

    def where(self) -> str:
        """For an error: how many rows are in the partial file."""
        self.flush()
        return f"{len(self.rows) - len(self.waiting)} of {len(self.rows)} finished rows are in {self.partial}"

    @staticmethod
    def _set_aside(path: Path, why: str) -> None:
        """Rename a file that would be overwritten, if it exists."""
        if path.exists():
            names = (path.with_name(f"{path.name}~{n or ''}") for n in itertools.count())
            kept = next(name for name in names if not name.exists())
            os.replace(path, kept)
            log.warning("%s %s", why, kept)

    def finish(self, whole: bool) -> None:
        """Put the finished rows in place, if there are any. May be called again after an interrupt.

        Args:
            whole: all rows are finished. If not, a file of an earlier job is not replaced but renamed.

        Raises:
            UserError: the disk is full; the message says where the rows are.
        """
        if not self.rows:
            return
        self._whole |= whole
        sorted_file = self.path.with_name(self.path.name + ".sorted")
        try:
            text = "".join(json.dumps(self.rows[index]) + "\n" for index in sorted(self.rows))
            sorted_file.write_text(text, encoding="utf-8")
            if not self._whole:
                self._set_aside(self.path, "the output file of an earlier job is kept in")
            os.replace(sorted_file, self.path)
        except OSError as e:
            sorted_file.unlink(missing_ok=True)
            raise UserError(f"cannot write {self.path}: {e.strerror}; {self.where()}") from None
        self.waiting.clear()
        with suppress(OSError):
            if self.file is not None:
                self.file.close()
            self.partial.unlink(missing_ok=True)


def row_of(output) -> dict:
    """An output as a row of the output file."""
    if output.error is not None:
        return {"index": output.index, "error": output.error}
    done = output.outputs[0]
    return {"index": output.index, "text": done.text, "token_ids": done.token_ids, "finish_reason": done.finish_reason}
