"""The manifest beside an output file: identifies the job, so that it can resume. It is locked while the job runs."""

from __future__ import annotations

import fcntl
import json
import os
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import BinaryIO

import numpy as np

from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.input import id_hash
from h2o_flexgen.jobs.output import replace_file
from h2o_flexgen.policy import KVBudget
from h2o_flexgen.utils.files import open_regular

#: rows on a line of the file
LINE_ROWS = 1024
#: of the two numbers of a row, the hash of its id and its digest
PACKED = np.dtype(">u8")
#: the end of the line before the rows
ROWS = b'"rows": [\n'
#: the line after them
END = b"]}\n"


def manifest_path(output: Path) -> Path:
    return Path(f"{output}.manifest.json")


@dataclass
class Manifest:
    """All that decides the tokens of a job's rows, and its history.

    Attributes:
        settings: by the names of arguments, those that must not change from one run to the next.
        kv_budget: from `KVBudget.to_dict`; None for a full cache.
        longest_prompt: of the job when it first began, in tokens.
        rows: (N, 2) uint64, as `Rows.known`; in the file, base64 with LINE_ROWS rows a line.
        compress_cache: the format of the KV cache.
        runs: of each, the time of its "start", in seconds of the Unix epoch, and the rows that were "done" by then.
    """

    settings: dict
    kv_budget: dict | None
    longest_prompt: int
    rows: np.ndarray
    runs: list[dict]
    compress_cache: str | None = None

    def write(self, path: Path, *, is_new: bool) -> BinaryIO:
        """Write the file; returns it, locked. Raises OSError as `replace_file`."""
        return replace_file(path, self._encoded(), is_new=is_new)

    def _encoded(self) -> Iterator[bytes]:
        """As JSON in lines that a reader may parse one at a time."""
        fields = dict(vars(self))
        rows = fields.pop("rows")
        yield json.dumps(fields).encode().removesuffix(b"}") + b", " + ROWS
        for begin in range(0, len(rows), LINE_ROWS):
            packed = b64encode(rows[begin : begin + LINE_ROWS].astype(PACKED).tobytes())
            yield b'%b"%b"' % (b",\n" if begin else b"", packed)
        yield b"\n" + END

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """A manifest; None if there is no file. Raises UserError if it cannot be read or is damaged."""
        try:
            with open(open_regular(path), "rb") as file:
                found = cls(**_fields(file))
            shapes = [
                len(found.rows) > 0,
                found.settings.items(),
                found.runs,
                all(isfinite(run["start"]) and type(run["done"]) is int and run["done"] >= 0 for run in found.runs),
                found.kv_budget is None or KVBudget.from_dict(found.kv_budget),
                found.longest_prompt > 0,
            ]
            if all(shapes):
                return found
        except FileNotFoundError:
            return None
        except OSError as e:
            raise UserError(f"cannot read {path}: {e.strerror}") from None
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError, OverflowError):
            pass
        raise UserError(f"the manifest {path} is damaged: put it back, or begin again with `restart`")


def _fields(file: BinaryIO) -> dict:
    head = file.readline()
    if head.endswith(ROWS):
        fields = json.loads(head + END)
        lines = iter(file.readline, END)
        return fields | {"rows": _unpacked(json.loads(line.rstrip(b",\n")) for line in lines)}
    fields = json.loads(head + file.read())
    return fields | {"rows": _unpacked(fields["rows"])}


def _unpacked(parts: Iterable[str | list]) -> np.ndarray:
    """The rows of a manifest; those of earlier versions have [id, digest] of each."""
    found = bytearray()
    for part in parts:
        if isinstance(part, str):
            found += b64decode(part, validate=True)
        else:
            id, digest = part
            found += id_hash(id).to_bytes(8, "big") + bytes.fromhex(digest)
    return np.frombuffer(found, PACKED).astype(np.uint64).reshape(-1, 2)


def lock(path: Path) -> BinaryIO | None:
    """Lock the manifest of a job against other jobs until the returned file is closed; None if there is no manifest.
    Raises UserError if it cannot be read, or another job has locked it."""
    busy = UserError(f"another job is writing the output file of {path}")
    try:
        file = open(open_regular(path, os.O_RDWR), "r+b")  # NFS locks only files that are open for writing
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        file.close()
        raise busy from None
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):  # just replaced
        file.close()
        raise busy
    return file


def is_running(path: Path) -> bool:
    """Whether a job has locked the manifest. Raises UserError if it cannot be read."""
    try:
        with open(open_regular(path), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    return False
