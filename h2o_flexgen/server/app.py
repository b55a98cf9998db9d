"""The HTTP endpoints: OpenAI's files, batches and models.

https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import json
import logging
import time

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from h2o_flexgen.server.access import check_access
from h2o_flexgen.server.errors import ApiError, is_full, not_found
from h2o_flexgen.server.form import Form
from h2o_flexgen.server.objects import Batch
from h2o_flexgen.server.params import batch_params, page_params
from h2o_flexgen.server.store import Store
from h2o_flexgen.server.validation import check_input
from h2o_flexgen.server.worker import Worker

log = logging.getLogger(__name__)

#: endpoints that would answer at once
INTERACTIVE = ("chat/completions", "completions", "responses", "embeddings")
#: the most bytes of a body that is no upload
BODY_BYTES = 1 << 17


class Json(Response):
    """In ASCII: clients may have sent half a surrogate pair, which UTF-8 cannot hold."""

    media_type = "application/json"

    def render(self, content) -> bytes:
        return json.dumps(content).encode()


class Api:
    """The endpoints. Those that are plain methods run in threads.

    Args:
        most: the most bytes of an upload.
    """

    def __init__(self, store: Store, worker: Worker, most: int):
        self.store = store
        self.worker = worker
        self.most = most
        self.model = worker.llm.model.name
        self.started = int(time.time())

    def routes(self) -> list[Route]:
        refused = [Route(f"/v1/{name}", self.interactive, methods=["POST"]) for name in INTERACTIVE]
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{id:path}", self.one_model),
            Route("/v1/files", self.files),
            Route("/v1/files", self.upload, methods=["POST"]),
            Route("/v1/files/{id}", self.file),
            Route("/v1/files/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/files/{id}/content", self.content),
            Route("/v1/batches", self.batches),
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches/{id}", self.batch),
            Route("/v1/batches/{id}/cancel", self.cancel, methods=["POST"]),
            *refused,
        ]

    # models

    def models(self, request: Request) -> Response:
        return listed([self._model()], has_more=False)

    def one_model(self, request: Request) -> Response:
        if (id := request.path_params["id"]) != self.model:
            raise not_found("model", id)
        return Json(self._model())

    def _model(self) -> dict:
        return {"id": self.model, "object": "model", "created": self.started, "owned_by": "h2o_flexgen"}

    def interactive(self, request: Request) -> Response:
        message = (
            "this server runs batches, and answers no request at once: upload a file of requests to /v1/files with "
            "the purpose batch, and create a batch of it at /v1/batches"
        )
        raise ApiError(400, message, code="batches_only")

    # files

    def files(self, request: Request) -> Response:
        page = page_params(request.query_params, most=10_000, default=10_000)
        found, has_more = self.store.files(page, request.query_params.get("purpose"))
        return listed([file.to_dict() for file in found], has_more)

    async def upload(self, request: Request) -> Response:
        with self.store.upload() as content:
            form = Form(request.headers.get("content-type", ""), content, self.most)
            async for piece in request.stream():
                form.feed(piece)
            form.check()
            file = await run_in_threadpool(self.store.add_file, content, form.filename)
        return Json(file.to_dict())

    def file(self, request: Request) -> Response:
        return Json(self.store.file(request.path_params["id"]).to_dict())

    def delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        self.store.remove_file(id)
        return Json({"id": id, "object": "file", "deleted": True})

    def content(self, request: Request) -> Response:
        file = self.store.file(request.path_params["id"])
        return FileResponse(self.store.path(file), media_type="application/octet-stream", filename=file.filename)

    # batches

    def batches(self, request: Request) -> Response:
        found, has_more = self.store.batches(page_params(request.query_params, most=100, default=20))
        return listed([self._shown(batch) for batch in found], has_more)

    async def create(self, request: Request) -> Response:
        body = await read_body(request)
        return Json(await run_in_threadpool(self._create, body))

    def _create(self, body: bytes) -> dict:
        params = batch_params(body)
        file = self.store.file(params["input_file_id"])
        if file.purpose != "batch":
            raise ApiError(400, f"{file.id} is no upload with the purpose batch", param="input_file_id")
        found = check_input(self.store.path(file), params["endpoint"])
        if "errors" in found:
            found |= {"status": "failed", "failed_at": int(time.time())}
        return self._shown(self.store.add_batch(model=self.model, **params, **found))

    def batch(self, request: Request) -> Response:
        return Json(self._shown(self.store.batch(request.path_params["id"])))

    def cancel(self, request: Request) -> Response:
        return Json(self._shown(self.store.cancel(request.path_params["id"])))

    def _shown(self, batch: Batch) -> dict:
        return batch.to_dict(self.worker.progress(batch))


def listed(data: list[dict], has_more: bool) -> Response:
    """OpenAI's list object."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return Json({"object": "list", "data": data, "has_more": has_more} | ends)


async def read_body(request: Request) -> bytes:
    """Raises ApiError if it is too large."""
    found = bytearray()
    async for piece in request.stream():
        found += piece
        if len(found) > BODY_BYTES:
            raise ApiError(413, f"the body is too large: at most {BODY_BYTES} bytes")
    return bytes(found)


class Guard:
    """Lets only requests pass that have the key."""

    def __init__(self, app: ASGIApp, key: str | None):
        self.app = app
        self.key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                check_access(Headers(scope=scope), self.key)
        except ApiError as e:
            await on_api_error(None, e)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def make_app(api: Api, key: str | None) -> ASGIApp:
    """The application that a web server runs. `key`: that requests must have; None for none."""
    handlers = {
        ApiError: on_api_error,
        HTTPException: on_http_error,
        OSError: on_os_error,
        ClientDisconnect: on_disconnect,
        Exception: on_error,
    }
    return Guard(Starlette(routes=api.routes(), exception_handlers=handlers), key)


def on_api_error(request: Request | None, error: ApiError) -> Response:
    return Json(error.to_dict(), error.status)


def on_http_error(request: Request, error: HTTPException) -> Response:
    """An address or a method that is unknown."""
    message = f"{error.detail}: {request.method} {request.url.path}"
    return on_api_error(request, ApiError(error.status_code, message, code="unknown_url"))


def on_os_error(request: Request, error: OSError) -> Response:
    if is_full(error):
        return on_api_error(request, ApiError(507, "the server's disk is full: try again later", code="disk_full"))
    log.warning("%s %s: %s", request.method, request.url.path, error)
    return on_api_error(request, ApiError(500, f"the server cannot access its files: {error.strerror}"))


def on_disconnect(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=400)  # nobody reads it


def on_error(request: Request, error: Exception) -> Response:
    """The web server writes the traceback to its log."""
    return on_api_error(request, ApiError(500, "internal error: the server's log says more"))
