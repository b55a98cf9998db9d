"""A Hugging Face hub on this machine, for tests: repositories in memory, behind HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "1234567890abcdef" * 2 + "12345678"


@dataclass
class Hub:
    """What the server holds and does.

    Attributes:
        repositories: {owner/name: {path: bytes}}, all of them at COMMIT.
        revisions: names of COMMIT.
        refusal: (status, the hub's code of an error) of the answers to all requests; None where there is none.
        gated: whether files are kept back from those without a licence, while what there is may be seen.
        cut: bytes of a file after which the connection breaks, once.
        asked: (method, path) of every request.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: tuple[str, ...] = ("main", "v1.0", "refs/pr/1", COMMIT)
    refusal: tuple[int, str] | None = None
    gated: bool = False
    cut: int | None = None
    asked: list[tuple[str, str]] = field(default_factory=list)

    def __enter__(self) -> Hub:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *exc) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def files_asked(self) -> list[str]:
        return [path.rpartition("/")[2] for method, path in self.asked if method == "GET" and "/resolve/" in path]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.asked.append((self.command, path))
        if self.hub.refusal is not None:
            return self._refuse(*self.hub.refusal)
        words = path.split("/")
        is_api = words[:2] == ["api", "models"]
        name = "/".join(words[2:4] if is_api else words[:2])
        if name not in self.hub.repositories:
            return self._refuse(401, "RepoNotFound")
        files = self.hub.repositories[name]
        rest = "/".join(words[4:] if is_api else words[2:]) or "revision/main"
        what, _, rest = rest.partition("/")
        revision = next((r for r in self.hub.revisions if rest == r or rest.startswith(f"{r}/")), None)
        if revision is None:
            return self._refuse(404, "RevisionNotFound")
        file = rest[len(revision) + 1 :]
        if what == "revision":
            siblings = [{"rfilename": path} for path in files]
            facts = {"private": False, "downloads": 0, "likes": 0, "tags": []}  # that older clients want to hear
            return self._send(json.dumps({"id": name, "sha": COMMIT, "siblings": siblings, **facts}).encode())
        if what == "tree":
            listed = [{"type": "file", "path": p, "size": len(b), "oid": _digest(b)} for p, b in files.items()]
            return self._send(json.dumps(listed).encode())
        if self.hub.gated:
            return self._refuse(403, "GatedRepo")
        if file not in files:
            return self._refuse(404, "EntryNotFound")
        self._send(files[file], is_file=True)

    def _refuse(self, status: int, code: str) -> None:
        self._send(b"", status, {"X-Error-Code": code, "X-Error-Message": "no", "X-Repo-Commit": COMMIT})

    def _send(
        self, body: bytes, status: int = 200, headers: dict[str, str] | None = None, is_file: bool = False
    ) -> None:
        headers = dict(headers or {})
        if is_file:
            headers |= {"ETag": f'"{_digest(body)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            first = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
            if first:
                headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
                status = 206
                body = body[first:]
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "GET":
            return
        if is_file and self.hub.cut is not None and len(body) > self.hub.cut:
            body = body[: self.hub.cut]
            self.hub.cut = None
            self.close_connection = True
        self.wfile.write(body)


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
