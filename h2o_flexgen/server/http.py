"""The web server: a thread, so that jobs run in the main thread, where signals arrive."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from h2o_flexgen.errors import UserError

#: that responses may take which are under way when the server stops
STOP_SECONDS = 5


def bind(host: str, port: int) -> socket.socket:
    """A socket with an address; port 0 is any that is free. Raises UserError if there is none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
    except OSError as e:
        raise UserError(f"`host` {host} is no address: {e.strerror}") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not refused for a minute after a restart
        found.bind(address)
        return found
    except OSError as e:
        found.close()
        raise UserError(f"cannot serve at `host` {host}, `port` {port}: {e.strerror}") from None


def url_of(listener: socket.socket) -> str:
    """What clients call the base URL."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


@contextmanager
def serving(app: ASGIApp, listener: socket.socket) -> Iterator[None]:
    """Inside, clients are served."""
    listener.listen(socket.SOMAXCONN)
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(2 * STOP_SECONDS)
