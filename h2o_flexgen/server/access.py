"""Who may use the server: whoever has the key; without one, programs of this machine."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

from h2o_flexgen.server.errors import ApiError


def check_access(headers: Mapping[str, str], key: str | None) -> None:
    """Raises ApiError unless a request has the key. Without a key it must not come from a web page: a page can send
    requests to this machine, with an Origin, or under a name of its own."""
    if key is not None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), key.encode()):
            raise ApiError(401, "the API key is wrong or missing", code="invalid_api_key")
    elif "origin" in headers or not is_loopback(host_of(headers.get("host", ""))):
        raise ApiError(403, "without an API key this server is for programs of its own machine", code="no_access")


def host_of(header: str) -> str:
    """The host of a Host header; "" if there is none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself, whatever names mean elsewhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
