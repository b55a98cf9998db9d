"""The server as a client of OpenAI sees it: the official client, unchanged, and bad requests of all kinds."""

from __future__ import annotations

import errno
import http.client
import io
import json
import os
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from command_tools import write_model
from machines import ROOT

for library in ("openai", "starlette", "uvicorn", "python_multipart"):
    pytest.importorskip(library)

import openai  # noqa: E402

from h2o_flexgen import LLM, Policy, SamplingParams, UserError  # noqa: E402
from h2o_flexgen.server import worker as worker_module  # noqa: E402
from h2o_flexgen.server.app import Api, make_app  # noqa: E402
from h2o_flexgen.server.http import bind, serving, url_of  # noqa: E402
from h2o_flexgen.server.store import Store  # noqa: E402
from h2o_flexgen.server.worker import OtherSettings, Worker  # noqa: E402

pytest_plugins = ["command_tools"]

URL = "/v1/completions"
#: bytes of an upload in these tests
MOST = 20_000


@dataclass
class Served:
    """A server in this process; `work` runs the batches that clients have created."""

    store: Store
    worker: Worker
    url: str
    clients: dict[str, openai.OpenAI] = field(default_factory=dict)

    def client(self, key: str = "any") -> openai.OpenAI:
        """Clients are slow to make, and threads may share one."""
        if key not in self.clients:
            self.clients[key] = openai.OpenAI(base_url=self.url, api_key=key, max_retries=0)
        return self.clients[key]

    def upload(self, rows: list, name: str = "rows.jsonl") -> str:
        return self.client().files.create(file=(name, lines_of(rows)), purpose="batch").id

    def create(self, rows: list, endpoint: str = URL):
        return self.client().batches.create(input_file_id=self.upload(rows), endpoint=endpoint, completion_window="24h")

    def work(self) -> None:
        while (batch := self.store.unfinished()) is not None:
            self.worker.run_batch(batch)

    def lines(self, id: str) -> list[dict]:
        return [json.loads(line) for line in self.client().files.content(id).text.splitlines()]

    def request(self, method: str, path: str, body: bytes | str = b"", **headers: str) -> tuple[int, dict]:
        """Status and body of a response to a request that no client would make."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=20)
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def lines_of(rows: list) -> bytes:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()


def ask(name: str, prompt: list[int] | None = None, **body) -> dict:
    body = {"model": "any", "prompt": prompt or [5, 6, 7], "max_tokens": 4, "logprobs": 0} | body
    return {"custom_id": name, "method": "POST", "url": URL, "body": body}


def tokens_of(line: dict) -> list[str]:
    """The tokens of a line of an output file, such as "token_id:5": the model has no tokenizer."""
    return line["response"]["body"]["choices"][0]["logprobs"]["tokens"]


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, Policy(gpu_batch_size=2), device="cpu", dtype="float32", progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def serve(llm, tmp_path):
    """serve(key) -> a server for a `with`, with the same folder each time."""

    @contextmanager
    def run(key: str | None = None, llm: LLM = llm, **options):
        with Store(tmp_path / "data") as store, bind("127.0.0.1", 0) as listener:
            worker = Worker(store, llm, SamplingParams(ignore_eos=True), **options)
            with serving(make_app(Api(store, worker, MOST), key), listener):
                yield Served(store, worker, url_of(listener))

    return run


@pytest.fixture
def served(serve):
    with serve() as found:
        yield found


@pytest.fixture
def quick(monkeypatch):
    """A full disk is tried again at once."""
    monkeypatch.setattr(worker_module, "FULL_SECONDS", 0.01)


def test_a_batch_from_upload_to_download(served):
    """Good rows and a bad one, with the official client."""
    client = served.client()
    rows = [ask("a"), ask("b", [9]), ask("c", tools=[{"type": "function"}]), ask("d", [1] * 100)]
    file = client.files.create(file=("../../etc/rows.jsonl", lines_of(rows)), purpose="batch")
    assert (file.filename, file.purpose, file.bytes) == ("rows.jsonl", "batch", len(lines_of(rows)))
    made = client.batches.create(
        input_file_id=file.id, endpoint=URL, completion_window="24h", metadata={"for": "a test"}
    )
    assert (made.status, made.request_counts.total, made.metadata) == ("validating", 4, {"for": "a test"})
    served.work()
    batch = client.batches.retrieve(made.id)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 4, 2, 2)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (4, 8, 12)
    done = served.lines(batch.output_file_id)
    assert [line["custom_id"] for line in done] == ["a", "b"]
    assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in done)
    failed = served.lines(batch.error_file_id)
    assert [line["custom_id"] for line in failed] == ["c", "d"]
    assert failed[0]["response"]["body"]["error"]["param"] == "tools"
    assert client.files.retrieve(batch.error_file_id).purpose == "batch_output"
    assert list(served.store.jobs.iterdir()) == []


def test_the_documented_client(serve, talker, tmp_path, monkeypatch):
    """With the questions of docs/jobs.md, and a tiny model, whose answers are meaningless."""
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"# make_questions.py\n(.*?)```", (ROOT / "docs/jobs.md").read_text(), re.DOTALL)[1], {})
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/server.md").read_text(), re.DOTALL)[1]
    with LLM(talker, Policy(), device="cpu", dtype="float32", progress=False) as llm, serve(llm=llm) as served:
        code = code.replace("http://127.0.0.1:8000/v1", served.url).replace("time.sleep(10)", "work()")
        exec(code, {"work": served.work})
    answers = [json.loads(line) for line in open("answers.jsonl")]
    assert [line["custom_id"] for line in answers] == ["Paris", "four"]
    assert all(line["response"]["body"]["choices"][0]["message"]["content"] for line in answers)


def test_the_tokens_are_those_of_generate(served, llm):
    made = served.create([ask("a", [3, 4]), ask("b", [8, 9, 10])])
    served.work()
    done = served.lines(served.client().batches.retrieve(made.id).output_file_id)
    outputs = llm.generate([[3, 4], [8, 9, 10]], SamplingParams(max_tokens=4, ignore_eos=True))
    expected = [[f"token_id:{token}" for token in output.outputs[0].token_ids] for output in outputs]
    assert list(map(tokens_of, done)) == expected


def test_lists_are_cut_into_pages(served):
    client = served.client()
    ids = [served.create([ask("a")]).id for _ in range(3)]
    assert [batch.id for batch in client.batches.list()] == ids[::-1]
    page = client.batches.list(limit=2)
    assert ([batch.id for batch in page.data], page.has_more) == (ids[:0:-1], True)
    assert [batch.id for batch in client.batches.list(limit=1)] == ids[::-1], "the client follows the pages"
    files = list(client.files.list(purpose="batch", order="asc", limit=2))
    assert [file.id for file in files] == [client.batches.retrieve(id).input_file_id for id in ids]
    assert list(client.files.list(purpose="batch_output")) == []
    assert served.request("GET", "/v1/batches?limit=0")[0] == served.request("GET", "/v1/files?order=up")[0] == 400
    assert served.request("GET", "/v1/batches?after=batch_x")[1]["error"]["param"] == "after"


def test_batches_run_in_the_order_of_their_creation(served):
    ids = [served.create([ask("a")]).id for _ in range(2)]
    assert served.store.next().id == ids[0]
    served.worker.run_batch(served.store.next())
    assert [served.store.batch(id).status for id in ids] == ["completed", "validating"]


def test_two_clients_at_once(served):
    """Each gets the file and the batch that it made."""
    found = {}

    def use(n: int) -> None:
        made = served.create([ask(f"{n}-{i}") for i in range(8)])
        found[n] = made.id

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found.values())) == 4
    served.work()
    for n, id in found.items():
        lines = served.lines(served.store.batch(id).output_file_id)
        assert [line["custom_id"] for line in lines] == [f"{n}-{i}" for i in range(8)]


def test_models(served, llm):
    client = served.client()
    assert [model.id for model in client.models.list()] == [llm.model.name]
    assert served.request("GET", f"/v1/models/{llm.model.name}")[1]["id"] == llm.model.name
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_interactive_endpoints_point_to_batches(served):
    with pytest.raises(openai.BadRequestError, match="/v1/batches") as caught:
        served.client().chat.completions.create(model="any", messages=[{"role": "user", "content": "Hello"}])
    assert caught.value.code == "batches_only"


# batches that end early


def test_a_batch_that_waits_is_cancelled_at_once(served):
    made = served.create([ask("a")])
    batch = served.client().batches.cancel(made.id)
    assert (batch.status, batch.output_file_id) == ("cancelled", None)
    assert served.store.unfinished() is None
    with pytest.raises(openai.BadRequestError, match="which is cancelled"):
        served.client().batches.cancel(made.id)


def test_cancelling_a_running_batch_keeps_its_finished_rows(served, monkeypatch):
    made = served.create([ask(f"{n}", max_tokens=3 + 5 * n) for n in range(6)])
    client = served.client()
    seen = []

    def on_finished(running, rows):
        real(running, rows)
        seen.append(client.batches.retrieve(made.id))
        if len(seen) == 2:
            assert client.batches.cancel(made.id).status == "cancelling"
            assert client.batches.cancel(made.id).status == "cancelling", "again"

    real = worker_module.Running.on_finished
    monkeypatch.setattr(worker_module.Running, "on_finished", on_finished)
    served.work()
    assert seen[0].status == "in_progress" and seen[0].progress["rows_done"] == seen[0].request_counts.completed
    assert seen[0].progress["tokens_per_s"] > 0 and seen[0].progress["seconds_left"] > 0
    batch = client.batches.retrieve(made.id)
    assert (batch.status, batch.request_counts.total, batch.request_counts.failed) == ("cancelled", 6, 0)
    done = served.lines(batch.output_file_id)
    assert 2 <= batch.request_counts.completed == len(done) < 6
    again = served.create([ask("a")])
    served.work()
    assert client.batches.retrieve(again.id).status == "completed", "the next batch runs"


def test_a_batch_in_which_no_row_can_run(served):
    made = served.create([ask("a", [1] * 100), ask("b", n=3)])
    served.work()
    batch = served.client().batches.retrieve(made.id)
    assert (batch.status, batch.request_counts.failed, batch.output_file_id) == ("completed", 2, None)
    assert [line["custom_id"] for line in served.lines(batch.error_file_id)] == ["a", "b"]


@pytest.mark.parametrize(
    "rows, line, message",
    [
        ([ask("a"), ask("a")], None, "lines 1 and 2 have the same custom_id 'a'"),
        ([ask("a"), "not JSON"], 2, "not JSON"),
        ([ask("a"), {"prompt": "a plain row"}], 2, "not a request"),
        ([ask("a"), ask("b") | {"url": "/v1/chat/completions"}], 2, "not the endpoint of the batch"),
        ([ask("a"), ask("b") | {"url": "/v1/audio"}], 2, "url must be one of"),
        ([ask("a") | {"custom_id": None}], 1, "needs a custom_id"),
        (["", ""], None, "holds no prompts"),
    ],
)
def test_an_input_that_is_no_batch(served, rows, line, message):
    batch = served.create(rows)
    assert (batch.status, batch.errors.data[0].line) == ("failed", line)
    assert message in batch.errors.data[0].message
    assert str(served.store.content) not in batch.errors.data[0].message, "clients see no paths"
    assert served.store.unfinished() is None


def test_a_job_that_fails_keeps_its_finished_rows(served, monkeypatch):
    made = served.create([ask(f"{n}", max_tokens=3 + 5 * n) for n in range(6)])
    real = worker_module.Running.on_finished

    def on_finished(running, rows):
        real(running, rows)
        raise UserError("the checkpoint is damaged")

    monkeypatch.setattr(worker_module.Running, "on_finished", on_finished)
    served.work()
    batch = served.client().batches.retrieve(made.id)
    assert batch.status == "failed" and "the checkpoint is damaged" in batch.errors.data[0].message
    assert len(served.lines(batch.output_file_id)) == batch.request_counts.completed >= 1


# stopping, and going on


def test_a_stopped_server_goes_on(serve, monkeypatch):
    """With the rows that were finished, and the texts of a server that never stopped."""
    rows = [ask(f"{n}", max_tokens=3 + 5 * n, temperature=1, seed=n) for n in range(6)]
    with serve() as first:
        whole = first.create(rows)
        first.work()
        expected = first.lines(first.store.batch(whole.id).output_file_id)
        made = first.create(rows)
        with monkeypatch.context() as patch:
            patch.setattr(worker_module.Running, "on_finished", stop)
            with pytest.raises(KeyboardInterrupt):
                first.work()
        assert first.store.batch(made.id).status == "in_progress"
    with serve() as second:
        assert second.client().batches.retrieve(made.id).status == "in_progress"
        second.work()
        done = second.lines(second.store.batch(made.id).output_file_id)
    assert list(map(tokens_of, done)) == list(map(tokens_of, expected))


def stop(running, rows):
    raise KeyboardInterrupt


def test_a_batch_goes_on_only_with_its_own_settings(serve, monkeypatch):
    with serve() as first:
        made = first.create([ask("a"), ask("b")])
        with monkeypatch.context() as patch:
            patch.setattr(worker_module.Running, "on_finished", stop)
            with pytest.raises(KeyboardInterrupt):
                first.work()
    with serve() as second:
        second.worker.params = SamplingParams(ignore_eos=True, temperature=0.5)
        with pytest.raises(OtherSettings, match="`temperature` 0.0, now 0.5"):
            second.work()
    with serve(restart=True) as third:
        third.worker.params = SamplingParams(ignore_eos=True, temperature=0.5)
        third.work()
        assert third.store.batch(made.id).completed == 2
        assert list(third.store.jobs.iterdir()) == []


def test_a_folder_has_one_server(served, serve, tmp_path):
    with pytest.raises(UserError, match="another server uses it"), serve():
        pass
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(UserError, match="chmod 700"):
        Store(tmp_path / "open")


def test_what_a_killed_server_left_goes_at_the_next_start(serve):
    with serve() as first:
        made = first.create([ask("a")])
        first.work()
        (first.store.content / ".upload-x").write_text("half")
        (first.store.content / "file-without-a-record").write_text("half")
        (first.store.jobs / f"{made.id}.jsonl").write_text("{}")
    with serve() as second:
        names = {path.name for path in second.store.content.iterdir()}
        assert names == {name + end for name in second.store._files.by_id for end in ("", ".json")}
        assert list(second.store.jobs.iterdir()) == []
        (second.store.batch(made.id), (second.store.content.parent / "batches" / "batch_1.json").write_text("[]"))
    with pytest.raises(UserError, match="batch_1.json is damaged"), serve():
        pass


# a full disk


def no_room(*args, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_upload_to_a_full_disk(served, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", no_room)
        with pytest.raises(openai.InternalServerError, match="disk is full") as caught:
            served.upload([ask("a")])
        assert caught.value.status_code == 507
    assert list(served.store.content.iterdir()) == []
    assert list(served.client().files.list()) == []


@pytest.mark.parametrize("calls", range(6))
def test_a_batch_waits_for_a_full_disk(served, monkeypatch, quick, calls):
    """Whichever of its writes fails, some times in a row."""
    made = served.create([ask("a"), ask("b"), ask("c", n=3)])
    real = os.fsync
    count = iter(range(calls + 3))

    def fsync(fd):
        if next(count, -1) >= calls:
            no_room()
        real(fd)

    monkeypatch.setattr("os.fsync", fsync)
    served.work()
    batch = served.store.batch(made.id)
    assert (batch.status, batch.completed, batch.failed) == ("completed", 2, 1)
    assert [line["custom_id"] for line in served.lines(batch.output_file_id)] == ["a", "b"]


# bad requests


def test_an_upload_that_is_too_large(served):
    with pytest.raises(openai.APIStatusError, match="too large: at most 20000 bytes") as caught:
        served.client().files.create(file=("a.jsonl", b"x" * (MOST + 1)), purpose="batch")
    assert caught.value.status_code == 413
    assert served.client().files.create(file=("a.jsonl", b"x" * MOST), purpose="batch").bytes == MOST
    assert len(list(served.store.content.iterdir())) == 2


@pytest.mark.parametrize(
    "name, label",
    [("../../etc/passwd", "passwd"), ("C:\\rows.jsonl", "rows.jsonl"), ("..", "unnamed"), ('a"b', "a%22b"), ("ü", "ü")],
)
def test_a_file_name_is_only_a_label(served, name, label):
    client = served.client()
    file = client.files.create(file=(name, io.BytesIO(b"x\n")), purpose="batch")
    assert client.files.retrieve(file.id).filename == label
    assert client.files.content(file.id).content == b"x\n"
    assert {path.name for path in served.store.content.iterdir()} == {file.id, f"{file.id}.json"}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"purpose": "fine-tune"}, "purpose must be batch"),
        ({"purpose": "batch", "expires_after": {"anchor": "created_at", "seconds": 3600}}, "not supported"),
        ({"purpose": "batch", "file": ("a", b"")}, "missing or empty"),
    ],
)
def test_a_bad_upload(served, options, message):
    with pytest.raises(openai.BadRequestError, match=message):
        served.client().files.create(**{"file": ("a.jsonl", b"x"), **options})


@pytest.mark.parametrize(
    "body, kind",
    [
        (b"{}", "application/json"),
        (b"--x\r\n", "multipart/form-data"),
        (b"nonsense", "multipart/form-data; boundary=x"),
        (
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\ncut',
            "multipart/form-data; boundary=x",
        ),
        (
            b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\na\r\n--x--\r\n',
            "multipart/form-data; boundary=x",
        ),
    ],
)
def test_an_upload_that_is_no_form(served, body, kind):
    status, found = served.request("POST", "/v1/files", body, Content_Type=kind)
    assert status == 400 and found["error"]["type"] == "invalid_request_error"
    assert list(served.store.content.iterdir()) == []


@pytest.mark.parametrize(
    "change, param",
    [
        ({"input_file_id": "file-unknown"}, "id"),
        ({"input_file_id": "../lock"}, "id"),
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"completion_window": None}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
    ],
)
def test_a_batch_of_bad_parameters(served, change, param):
    body = {"input_file_id": served.upload([ask("a")]), "endpoint": URL, "completion_window": "24h"} | change
    status, found = served.request("POST", "/v1/batches", json.dumps(body))
    assert status == (404 if param == "id" else 400) and found["error"]["param"] == param
    assert served.store.unfinished() is None


def test_a_batch_that_is_no_json(served):
    assert served.request("POST", "/v1/batches", "[1]")[0] == 400
    assert served.request("POST", "/v1/batches", "{" * 100_000)[0] == 400
    assert served.request("POST", "/v1/batches", " " * 200_000)[0] == 413


@pytest.mark.parametrize("path", ["/v1/files/file-x", "/v1/files/..%2Flock/content", "/v1/batches/batch_x", "/other"])
def test_what_is_unknown(served, path):
    status, found = served.request("GET", path)
    assert status == 404 and found["error"]["type"] == "invalid_request_error"
    assert served.request("PUT", "/v1/files")[0] == 405


def test_results_cannot_be_run_and_inputs_in_use_not_deleted(served):
    client = served.client()
    made = served.create([ask("a")])
    with pytest.raises(openai.BadRequestError, match="cancel it first"):
        client.files.delete(made.input_file_id)
    served.work()
    output = client.batches.retrieve(made.id).output_file_id
    with pytest.raises(openai.BadRequestError, match="no upload with the purpose batch"):
        client.batches.create(input_file_id=output, endpoint=URL, completion_window="24h")
    for id in (made.input_file_id, output):
        assert client.files.delete(id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(id)
    assert list(served.store.content.iterdir()) == []


def test_the_key(serve):
    with serve(key="secret") as served:
        assert served.client("secret").files.list().data == []
        for given in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
            {"Authorization": "Bearer é"},
        ):
            status, found = served.request("GET", "/v1/files", **given)
            assert status == 401 and found["error"]["code"] == "invalid_api_key"
        assert served.request("GET", "/v1/files", Authorization="Bearer secret", Host="example.com")[0] == 200


def test_web_pages_cannot_use_a_server_without_a_key(served):
    assert served.request("GET", "/v1/files", Origin="http://example.com")[0] == 403
    assert served.request("GET", "/v1/files", Host="rebound.example.com")[0] == 403
    assert served.request("GET", "/v1/files", Host="localhost:8000")[0] == 200
