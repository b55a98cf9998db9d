"""Error responses in OpenAI's form."""

from __future__ import annotations

import errno

#: what a full disk, or a full quota, raises
FULL = {errno.ENOSPC, errno.EDQUOT}


class ApiError(Exception):
    """A request that cannot be served.

    Attributes:
        status: of the HTTP response.
        param: the parameter at fault.
        code: names the kind of the error for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def to_dict(self) -> dict:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def not_found(what: str, id: str) -> ApiError:
    return ApiError(404, f"no {what} {id!r}", param="id", code="not_found")


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it replaced, came from a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        error = error.__context__
    return False
