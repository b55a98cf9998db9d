"""Files and batches as OpenAI's API has them.

https://platform.openai.com/docs/api-reference/files and .../batch: the file object and the batch object.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from h2o_flexgen.jobs.progress import Progress

#: the states of a batch that does not change any more
ENDED = {"completed", "failed", "cancelled"}


@dataclass(frozen=True)
class File:
    """A file that a client has uploaded, or the results of a batch; its content lies beside its record.

    Attributes:
        filename: a label that the client gave; no path of this machine.
        bytes: its size.
        created_at: seconds of the Unix epoch.
        purpose: "batch", or "batch_output" for results.
    """

    id: str
    filename: str
    bytes: int
    created_at: int
    purpose: str

    def to_dict(self) -> dict:
        """OpenAI's file object."""
        return {"object": "file", **vars(self), "status": "processed", "expires_at": None, "status_details": None}


@dataclass(frozen=True)
class Batch:
    """A batch, which waits ("validating"), runs ("in_progress", "cancelling", "finalizing") or has ended.

    Attributes:
        total, completed, failed: requests in the input, and those that have ended well or in an error. While the batch
            runs the worker knows the last two.
        errors: why it failed: a list of {"code", "line", "message", "param"}.
        usage: tokens of all requests, in OpenAI's form; None until it has ended.
        *_at: when it took that state, in seconds of the Unix epoch.
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    model: str
    created_at: int
    metadata: dict | None = None
    status: str = "validating"
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[dict] | None = None
    usage: dict | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def moved(self, status: str, **changes) -> Batch:
        """The batch in another state, from now on."""
        return replace(self, status=status, **{f"{status}_at": int(time.time())}, **changes)

    def to_dict(self, progress: Progress | None = None) -> dict:
        """OpenAI's batch object, and how far it is: `progress` of its job, if that runs."""
        found = {"object": "batch", **vars(self), "expires_at": None, "expired_at": None}
        counts = {name: found.pop(name) for name in ("total", "completed", "failed")}
        if progress is not None:
            counts |= {"completed": progress.completed, "failed": progress.failed}
        errors = self.errors and {"object": "list", "data": self.errors}
        return found | {"request_counts": counts, "errors": errors, "progress": progress and progress.to_dict()}
