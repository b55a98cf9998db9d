"""What a server keeps: files and batches, in a folder that it locks.

    FOLDER/lock
    FOLDER/files/ID, ID.json    the content of a file, and its record
    FOLDER/batches/ID.json      the record of a batch
    FOLDER/jobs/ID.jsonl        the output file of a batch's job, with its manifest, until the batch has ended

A file gets its record when its content is complete. What is there without a record was left by a server that was
killed, and goes at the next start.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.output import replace_file
from h2o_flexgen.server.errors import ApiError, not_found
from h2o_flexgen.server.folder import lock_folder, make_folder
from h2o_flexgen.server.objects import Batch, File
from h2o_flexgen.server.records import Page, Records
from h2o_flexgen.utils.files import sync


class Store:
    """The files and batches of a folder. Threads may share one; records never change, but are replaced.

    Raises:
        UserError: another server uses the folder, other users can, or it cannot be read.
    """

    def __init__(self, folder: Path):
        self.lock_file = lock_folder(make_folder(folder))
        try:
            self.content = make_folder(folder / "files")
            self.jobs = make_folder(folder / "jobs")
            self._files = Records(self.content, File)
            self._batches = Records(make_folder(folder / "batches"), Batch)
            self.lock = threading.RLock()
            self.has_new = threading.Condition(self.lock)
            self._remove_remains()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        self.lock_file.close()

    def _remove_remains(self) -> None:
        try:
            for path in self.content.iterdir():
                if path.name.startswith(".") or path.name.removesuffix(".json") not in self._files.by_id:
                    path.unlink()
            for path in self.jobs.iterdir():
                batch = self._batches.by_id.get(path.name.lstrip(".").partition(".")[0])
                if batch is None or batch.has_ended:
                    path.unlink()
        except OSError as e:
            raise UserError(f"cannot clear `folder` {self.content.parent}: {e.strerror}") from None

    # files

    def file(self, id: str) -> File:
        """Raises ApiError if there is none."""
        if (found := self._files.by_id.get(id)) is None:
            raise not_found("file", id)
        return found

    def path(self, file: File) -> Path:
        """Of its content."""
        return self.content / file.id

    def files(self, page: Page, purpose: str | None) -> tuple[list[File], bool]:
        """As `Page.of`."""
        with self.lock:
            return page.of([file for file in self._files.by_id.values() if purpose in (None, file.purpose)])

    @contextmanager
    def upload(self) -> Iterator[BinaryIO]:
        """A file to write, for `add_file`; gone at the end unless it was added."""
        file = tempfile.NamedTemporaryFile(dir=self.content, prefix=".upload-", delete=False)
        try:
            with file:
                yield file
        finally:
            Path(file.name).unlink(missing_ok=True)

    def add_file(self, content: BinaryIO, filename: str) -> File:
        """Keep what was written to `upload`. Raises OSError if it cannot be written."""
        content.flush()
        os.fsync(content.fileno())
        size = os.fstat(content.fileno()).st_size
        with self.lock:
            file = File(new_id("file-", self._files.by_id), filename, size, int(time.time()), "batch")
            os.replace(content.name, self.path(file))
            return self._add(file)

    def add_results(self, id: str, filename: str, lines: Iterable[bytes]) -> str | None:
        """Keep lines as the file `id`, or as a new version of it; returns the id, or None if there are no lines. Raises
        OSError if they cannot be written."""
        path = self.content / id
        replace_file(path, lines).close()
        size = path.stat().st_size
        if not size:
            path.unlink()
            return None
        with self.lock:
            return self._add(File(id, filename, size, int(time.time()), "batch_output")).id

    def _add(self, file: File) -> File:
        try:
            sync(self.content)  # the name of its content
            return self._files.put(file)
        except BaseException:
            self.path(file).unlink(missing_ok=True)
            raise

    def remove_file(self, id: str) -> None:
        """Raises ApiError if there is none, or a batch still reads it."""
        with self.lock:
            file = self.file(id)
            for batch in self._batches.by_id.values():
                if batch.input_file_id == id and not batch.has_ended:
                    message = f"{batch.id} reads {id} and has not ended: cancel it first"
                    raise ApiError(400, message, param="id", code="file_in_use")
            self._files.remove(id)
            self.path(file).unlink(missing_ok=True)

    # batches

    def batch(self, id: str) -> Batch:
        """Raises ApiError if there is none."""
        if (found := self._batches.by_id.get(id)) is None:
            raise not_found("batch", id)
        return found

    def batches(self, page: Page) -> tuple[list[Batch], bool]:
        """As `Page.of`."""
        with self.lock:
            return page.of(self._batches.by_id.values())

    def add_batch(self, **fields) -> Batch:
        """A new batch. Raises ApiError if its input file is gone, and OSError if it cannot be written."""
        with self.lock:
            self.file(fields["input_file_id"])
            batch = Batch(new_id("batch_", self._batches.by_id), created_at=int(time.time()), **fields)
            self._batches.put(batch)
            self.has_new.notify_all()
            return batch

    def move(self, id: str, status: str, **changes) -> Batch:
        """Put a batch in another state. Raises OSError if that cannot be written."""
        with self.lock:
            return self._batches.put(self.batch(id).moved(status, **changes))

    def next(self) -> Batch:
        """The oldest batch that has not ended; waits until there is one."""
        with self.has_new:
            while (found := self.unfinished()) is None:
                self.has_new.wait()
            return found

    def unfinished(self) -> Batch | None:
        """The oldest batch that has not ended."""
        with self.lock:
            left = [id for id, batch in self._batches.by_id.items() if not batch.has_ended]
            return self._batches.by_id[min(left)] if left else None

    def begin(self, id: str) -> Batch:
        """The batch, now running if it was waiting."""
        with self.lock:
            batch = self.batch(id)
            return self.move(id, "in_progress") if batch.status == "validating" else batch

    def finalize(self, id: str) -> Batch:
        """The batch, whose job is over, unless it is being cancelled."""
        with self.lock:
            batch = self.batch(id)
            return self.move(id, "finalizing") if batch.status == "in_progress" else batch

    def cancel(self, id: str) -> Batch:
        """Cancel a batch: one that waits ends at once, one that runs with the next layer. Raises ApiError if it has
        ended, or all its rows have run."""
        with self.lock:
            batch = self.batch(id)
            if batch.status == "validating":
                return self.move(id, "cancelled", cancelling_at=int(time.time()))
            if batch.status == "in_progress":
                return self.move(id, "cancelling")
            if batch.status == "cancelling":
                return batch
            raise ApiError(400, f"cannot cancel {id}, which is {batch.status}", param="id", code="batch_ended")

    def job_path(self, id: str) -> Path:
        """The output file of a batch's job."""
        return self.jobs / f"{id}.jsonl"

    def remove_job(self, id: str) -> None:
        """Remove the output file of a job, its manifest, and older versions of them."""
        for path in self.jobs.glob(f"{id}.jsonl*"):
            path.unlink(missing_ok=True)


def new_id(prefix: str, known: Iterable[str]) -> str:
    """An id that sorts behind the `known` ones, whatever the clock does."""
    newest = max((int(id.removeprefix(prefix)[:16], 16) for id in known), default=0)
    return f"{prefix}{max(time.time_ns(), newest + 1):016x}{secrets.token_hex(4)}"
