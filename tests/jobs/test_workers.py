"""Several workers give one worker's rows, whatever happens to them."""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_tools import read_rows, write_rows
from local_cluster import FATAL_TOKEN, Died, Killer, LocalCluster, MortalLLM, StubWorker
from stub_engine import StubLLM

from h2o_flexgen import KVBudget, Policy, SamplingParams, UserError
from h2o_flexgen.engine.params import PoolingParams
from h2o_flexgen.engine.runner import NAN_EVERYWHERE
from h2o_flexgen.jobs import cluster, input, ray
from h2o_flexgen.jobs.cluster import Workers, shares_of
from h2o_flexgen.jobs.dispatch import FATAL
from h2o_flexgen.jobs.job import Job
from h2o_flexgen.jobs.ray import RayLLM
from h2o_flexgen.jobs.worker import Place, Worker

pytest_plugins = ["command_tools"]

FP32 = {"device": "cpu", "dtype": "float32", "progress": False}
PARAMS = SamplingParams(max_tokens=5)


@pytest.fixture(autouse=True)
def local(monkeypatch):
    monkeypatch.setattr("h2o_flexgen.jobs.ray.Cluster", LocalCluster)


@contextmanager
def crew(model: Path, count: int = 2, kind: type[Worker] = StubWorker, **options):
    """An LLM with workers that are threads of this process."""
    llm_class = type("LocalLLM", (RayLLM,), {"worker_class": kind})
    with llm_class(Workers(count), model=str(model), **FP32 | options) as llm:
        yield llm


def run(llm, folder: Path, rows: list, out: str = "out.jsonl", params=PARAMS, **options) -> list[dict]:
    """The rows of the output file of a job."""
    with Job(str(folder / out)) as job:
        job.run(llm, input.read_rows(str(write_rows(folder / "in.jsonl", rows))), params, **options)
    return read_rows(folder / out)


def many(count: int) -> list[dict]:
    """Rows of several lengths, some with a name, some sampled, and some that cannot be run."""
    rows = [{"prompt_token_ids": [3 + n % 90] * (1 + n % 4), "max_tokens": 1 + n % 6} for n in range(count)]
    for n, row in enumerate(rows):
        row |= {"custom_id": f"row {n}"} if n % 3 else {}
        row |= {"temperature": 0.8} if n % 2 else {}
        row |= {"prompt_token_ids": []} if n % 7 == 6 else {}
    return rows


def alone(model: Path, folder: Path, rows: list, kind=StubLLM, params=PARAMS, **options) -> list[dict]:
    """The rows that one LLM gives."""
    with kind(str(model), **FP32 | options) as llm:
        return run(llm, folder, rows, "alone.jsonl", params)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_they_give_one_workers_rows(model, tmp_path, count):
    with crew(model, count) as llm:
        found = run(llm, tmp_path, many(200))
        assert found == alone(model, tmp_path, many(200))
        report = llm.report
    assert sum(worker["rows"] for worker in report["workers"]) == sum("error" not in row for row in found)
    assert report["total"]["generated_tokens"] == sum(len(row.get("token_ids", [])) for row in found)


def test_the_engine_gives_the_same_tokens_in_pieces(model, tmp_path):
    """With a KV budget that depends on the longest prompt of the whole job."""
    from h2o_flexgen import LLM

    budget = {"kv_budget": KVBudget.from_ratio(0.3), "policy": Policy(4)}
    whole = alone(model, tmp_path, many(60), LLM, **budget)
    with crew(model, 2, Worker, **budget) as llm:
        assert run(llm, tmp_path, many(60)) == whole
        assert llm.report["kv_budget"] == {"heavy": 1, "recent": 1, "rule": "voted"}


def test_answers_are_scored_and_texts_embedded(model, tmp_path):
    from h2o_flexgen import LLM

    rows = [{"prompt_token_ids": [3 + n, 5]} | ({"answers": [[7, 8], [9]]} if n % 2 else {}) for n in range(20)]
    texts = [{"prompt_token_ids": [3 + n, 5]} for n in range(9)]
    whole = alone(model, tmp_path, rows, LLM)
    with crew(model, 2, Worker) as llm:
        found = run(llm, tmp_path, rows)
        same = [row for row in found if "token_ids" in row]
        assert same == [row for row in whole if "token_ids" in row]
        for row, other in zip(found, whole):
            assert row.get("answer") == other.get("answer")
        with Job(str(tmp_path / "texts.jsonl")) as job:  # the same LLM runs another job
            path = str(write_rows(tmp_path / "texts.in.jsonl", texts))
            job.run(llm, input.read_rows(path, input.parse_text), PoolingParams())
        assert len(read_rows(tmp_path / "texts.jsonl")[0]["embedding"]) == 32
        assert llm.generate([[5, 6], [7]], SamplingParams(max_tokens=3))[1].outputs[0].token_ids
        with pytest.raises(UserError, match="by one LLM"):
            llm.score([[5, 6, 7]])


def test_a_fatal_row_becomes_an_error_and_stops_no_other(model, tmp_path, caplog):
    rows = many(60)
    rows[40] = {"prompt_token_ids": [FATAL_TOKEN]}
    with crew(model, 2) as llm:
        found = run(llm, tmp_path, rows)
    whole = alone(model, tmp_path, rows)
    assert found[40] == {"index": 40, "error": FATAL}
    assert [row for row in found if row["index"] != 40] == [row for row in whole if row["index"] != 40]
    assert "has died with" in caplog.text


class SlowLLM(MortalLLM):
    """Each window takes a while."""

    def meet(self, s) -> None:
        time.sleep(0.002)


class SlowWorker(StubWorker):
    llm_class = SlowLLM


def test_workers_that_are_killed_lose_nothing(model, tmp_path):
    with crew(model, 3, SlowWorker) as llm:
        with Killer(llm.cluster, 0.2) as killer:
            found = run(llm, tmp_path, many(500))
        assert killer.kills > 1
    assert found == alone(model, tmp_path, many(500))


def test_rows_are_written_as_they_end(model, tmp_path, monkeypatch):
    """An interrupt loses only rows that had not ended, and the job goes on with another number of workers."""
    with crew(model, 2) as llm, Job(str(tmp_path / "out.jsonl")) as job:
        rows = input.read_rows(str(write_rows(tmp_path / "in.jsonl", many(300))))
        written = []
        add = job_add(job, written, 100)
        monkeypatch.setattr("h2o_flexgen.jobs.job.JobWriter._add", add)
        with pytest.raises(KeyboardInterrupt):
            job.run(llm, rows, PARAMS)
    kept = len(read_rows(tmp_path / "out.jsonl"))
    assert 50 < kept < 300
    monkeypatch.undo()
    monkeypatch.setattr("h2o_flexgen.jobs.ray.Cluster", LocalCluster)
    with crew(model, 3) as llm:
        assert run(llm, tmp_path, many(300)) == alone(model, tmp_path, many(300))
        assert sum(worker["rows"] for worker in llm.report["workers"]) == 300 - kept


def test_one_llm_and_workers_go_on_with_each_others_jobs(model, tmp_path):
    rows = many(120)
    whole = alone(model, tmp_path, rows)
    with StubLLM(str(model), **FP32) as llm:
        llm.stop = 40
        with pytest.raises(KeyboardInterrupt):
            run(llm, tmp_path, rows)
    with crew(model, 2) as llm:
        assert run(llm, tmp_path, rows) == whole
        assert 0 < sum(worker["rows"] for worker in llm.report["workers"]) < 100
    out = tmp_path / "out.jsonl"
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:50]))
    with StubLLM(str(model), **FP32) as llm:
        llm.stop = 1 << 60
        assert run(llm, tmp_path, rows) == whole


def job_add(job: Job, written: list, most: int):
    """`JobWriter._add`, which is interrupted after `most` rows."""

    def add(self, index, row) -> None:
        self.job.output.add(index, row)
        written.append(index)
        if len(written) == most:
            self.job.output.flush()
            raise KeyboardInterrupt

    return add


class Unlucky(StubWorker):
    """Dies before its first pass."""

    class llm_class(MortalLLM):
        def run(self, job, writer):
            raise MemoryError("no memory for the weights")


def test_workers_that_never_begin_end_the_job(model, tmp_path):
    with crew(model, 2, Unlucky) as llm:
        message = "every worker has died 3 times before its first row: no memory for the weights"
        with pytest.raises(UserError, match=message):
            run(llm, tmp_path, many(5))
    assert not (tmp_path / "out.jsonl").exists()


class Starved(StubWorker):
    """Dies in the middle of its first run, and then before it begins, a few times."""

    starts = 0

    class llm_class(MortalLLM):
        def run(self, job, writer):
            Starved.starts += 1
            if 1 < Starved.starts < 9:
                raise Died("before its first row")
            super().run(job, writer)

        def meet(self, s):
            if Starved.starts == 1 and s.index > 20:
                raise Died("in the middle")


def test_a_job_that_has_begun_outlives_workers_that_die_before_their_first_row(model, tmp_path):
    with crew(model, 1, Starved) as llm:
        assert run(llm, tmp_path, many(60)) == alone(model, tmp_path, many(60))
        assert llm.report["workers"][0]["deaths"] == 8


class Broken(StubWorker):
    class llm_class(MortalLLM):
        def run(self, job, writer):
            raise UserError("the disk is broken")


def test_an_error_of_the_user_names_the_worker(model, tmp_path):
    with crew(model, 2, Broken) as llm:
        with pytest.raises(UserError, match="worker [01] on .*: the disk is broken"):
            run(llm, tmp_path, many(5))


def test_rows_that_had_ended_before_an_error_are_kept(model, tmp_path, monkeypatch):
    note = ray.Run._note

    def failing(self, n, ended):
        note(self, n, ended)
        if ended:
            raise UserError(f"{len(ended)} had ended")

    monkeypatch.setattr(ray.Run, "_note", failing)
    with crew(model, 2) as llm:
        with pytest.raises(UserError, match="had ended") as error:
            run(llm, tmp_path, many(40))
    assert len(read_rows(tmp_path / "out.jsonl")) >= int(str(error.value).split()[0])


class Doubtful(StubWorker):
    """A worker that sees only rows that give NaN, until it is told that the model is sound."""

    class llm_class(MortalLLM):
        told = 0

        def run(self, job, writer):
            if not job.is_sound:
                raise UserError(NAN_EVERYWHERE)
            super().run(job, writer)


def test_a_model_that_is_broken_everywhere_is_an_error(model, tmp_path):
    with crew(model, 2, Doubtful) as llm:
        with pytest.raises(UserError, match="NaN for every prompt"):
            run(llm, tmp_path, many(5))


def test_workers_need_the_same_model(model, tmp_path):
    class Other(StubWorker):
        loaded = 0

        def load(self, options, shares):
            found = super().load(options, shares)
            Other.loaded += 1
            return replace(found, fingerprint="other") if Other.loaded == 2 else found

    with crew(model, 2, Other) as llm:
        with pytest.raises(UserError, match="worker 1 on .*: its model is not that of worker 0 on"):
            run(llm, tmp_path, many(5))


def test_a_model_that_a_worker_lacks_is_named_with_the_worker(tmp_path):
    with pytest.raises(UserError, match="worker 0 on .*: .*missing"):
        with crew(tmp_path / "missing"):
            pass


def test_different_processors_are_said_where_tokens_depend_on_them(caplog):
    here = Place("here", "cpu 1", ram=100, disk=60, mount="/")
    there = replace(here, cpu="cpu 2")
    cluster.warn_of_processors([here, here], "bfloat16")
    cluster.warn_of_processors([here, there], "float32")
    assert not caplog.text
    cluster.warn_of_processors([here, there], "bfloat16")
    assert "different processors (cpu 1, cpu 2): in bfloat16 a text may depend on which" in caplog.text


def test_workers_on_one_disk_are_said_to_be_no_faster(model, tmp_path, caplog):
    with crew(model, 2, policy=Policy(4, percent=(0, 0, 100, 0, 100, 0))) as llm:
        run(llm, tmp_path, many(9))
    assert re.search("workers 0, 1 on .* are limited by the same disk: together they are no faster", caplog.text)


def test_memory_is_shared_by_the_workers_of_a_machine():
    here = Place("here", "cpu", ram=100, disk=60, mount="/")
    there = replace(here, host="there", ram=50)
    options = {"mem": None, "disk_mem": None}
    found = shares_of([here, there, here], None, options)
    assert found == {"here": {"mem": 50, "disk_mem": 30}, "there": {"mem": 50, "disk_mem": 60}}
    assert shares_of([here, here], None, {"mem": 40, "disk_mem": 10})["here"] == {"mem": 20, "disk_mem": 5}
    with pytest.raises(UserError, match="here has room for 1 of 2 workers with"):
        shares_of([here, here], 60, options)


# what only a user can get wrong


def test_ray_is_needed(cli, model, tmp_path, monkeypatch):
    monkeypatch.setattr("h2o_flexgen.jobs.ray.Cluster", cluster.Cluster)
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    rows = write_rows(tmp_path / "in.jsonl", many(3))
    code, _, err = cli("--model", model, "--workers", 2, "--input-file", rows, "--output-file", tmp_path / "out.jsonl")
    assert code == 2
    assert err == "error: --workers needs Ray, which is not installed: pip install 'h2o_flexgen[ray]'\n"


def test_a_cluster_of_another_version_is_refused(monkeypatch):
    def init(*args, **options):
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.40.0\n    Python: 3.11.2")

    fake = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setattr(cluster, "_import_ray", lambda: fake)
    monkeypatch.setattr(cluster, "_check_reachable", lambda address: None)
    message = "cannot use the Ray cluster at `ray` head:6379: Version mismatch: .* Ray: 2.40.0 Python: 3.11.2$"
    with pytest.raises(UserError, match=message):
        cluster.Cluster(Workers(2, "head:6379"), "cpu")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "ray://127.0.0.1:1"])
def test_an_address_where_nothing_listens(address, monkeypatch):
    monkeypatch.setattr(cluster, "_import_ray", lambda: SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(UserError, match=f"there is no Ray cluster at `ray` {address}: "):
        cluster.Cluster(Workers(2, address), "cpu")


def test_options_of_workers_need_workers(refused, model):
    assert refused("--model", model, "--worker-cpus", 1) == "--worker-cpus is for a job with --workers"


class Frail(StubWorker):
    """Dies in the first call of each kind, whichever worker it is."""

    died: set = set()

    def _die_once(self, name: str) -> None:
        if name not in Frail.died:
            Frail.died.add(name)
            raise Died(name)

    def place(self, offload_dir):
        self._die_once("place")
        return super().place(offload_dir)

    def load(self, options, shares):
        self._die_once("load")
        return super().load(options, shares)

    def plan(self, workload, kv_budget, compress_cache):
        self._die_once("plan")
        return super().plan(workload, kv_budget, compress_cache)


def test_workers_that_die_before_they_run_are_replaced_too(model, tmp_path):
    with crew(model, 2, Frail) as llm:
        assert run(llm, tmp_path, many(50)) == alone(model, tmp_path, many(50))
    assert Frail.died == {"place", "load", "plan"}


def test_workers_that_always_die_while_they_load_are_an_error(model):
    class Hopeless(StubWorker):
        def load(self, options, shares):
            raise Died("no memory")

    with pytest.raises(UserError, match="worker 0: no memory"):
        with crew(model, 2, Hopeless):
            pass


def test_a_worker_that_dies_between_plan_and_run_is_replaced(model, tmp_path):
    """What it has planned is nothing that the next process knows."""
    llm_class = type("LocalLLM", (RayLLM,), {"worker_class": StubWorker})
    with llm_class(Workers(2), model=str(model), **FP32) as llm:
        warn = ray.on_one_disk
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray, "on_one_disk", lambda crew, plans: crew.workers[1].actor.die() or warn(crew, plans))
            found = run(llm, tmp_path, many(50))
        assert [worker["deaths"] for worker in llm.report["workers"]] == [0, 1]
    assert found == alone(model, tmp_path, many(50))


class Locked(StubWorker):
    """Cannot begin its second run."""

    begun = 0

    def begin(self, *args):
        self.begun += 1
        if self.begun == 2:
            raise MemoryError("no thread")
        super().begin(*args)


def test_a_run_that_cannot_begin_loses_no_row(model, tmp_path):
    with crew(model, 2, Locked) as llm:
        assert run(llm, tmp_path, many(50)) == alone(model, tmp_path, many(50))
        assert run(llm, tmp_path, many(50), "again.jsonl") == read_rows(tmp_path / "alone.jsonl")
        assert sum(worker["deaths"] for worker in llm.report["workers"]) > 0


def test_a_worker_that_joins_later_keeps_to_its_memory(model, tmp_path, monkeypatch, caplog):
    class Noted(StubWorker):
        given = []

        def load(self, options, shares):
            Noted.given.append(options["mem"])
            return super().load(options, shares)

    monkeypatch.setattr(cluster, "shares_of", lambda *_: {"another machine": {"mem": 1 << 20}})
    llm_class = type("LocalLLM", (RayLLM,), {"worker_class": Noted})
    with llm_class(Workers(2, mem=3 << 30), model=str(model), **FP32) as llm:
        llm.crew.settings = replace(llm.crew.settings, dtype="bfloat16")
        llm.crew.arrive(1, replace(llm.crew.places[1], cpu="another"))
        llm.crew.arrive(1, llm.crew.places[1])
        assert caplog.text.count("different processors") == 1
        run(llm, tmp_path, many(5))
    assert set(Noted.given) == {3 << 30}


def ray_of(*nodes: dict, **found) -> SimpleNamespace:
    """A running Ray, whose machines have these resources."""
    total = {"CPU": sum(node.get("CPU", 0) for node in nodes), **found}
    alive = [{"Alive": True, "Resources": node} for node in nodes]
    return SimpleNamespace(is_initialized=lambda: True, cluster_resources=lambda: total, nodes=lambda: alive)


def test_machines_without_cores_have_no_worker(monkeypatch):
    """As the head of a cluster that shall run none."""
    monkeypatch.setattr(cluster, "_import_ray", lambda: ray_of({"memory": 1.0}, {"CPU": 8.0}, {"CPU": 8.0}))
    assert cluster.Cluster(Workers(address="auto"), "cpu").count == 2
    assert cluster.Cluster(Workers(4, "auto"), "cpu").asked == "4 cores"
    assert cluster.Cluster(Workers(2, "auto", mem=3 << 30), "cpu").asked == "8 cores, 3.00 GiB of RAM"


def test_a_cluster_without_room_is_said(model, monkeypatch, caplog):
    class Late(StubWorker):
        def place(self, offload_dir):
            while "as soon as there is more" not in caplog.text:
                time.sleep(0.01)
            return super().place(offload_dir)

    monkeypatch.setattr(cluster, "PLACE_SECONDS", 0.0)
    monkeypatch.setattr(cluster, "LOOK_SECONDS", 0.05)
    with crew(model, 1, Late):
        pass
    assert "the cluster has room for 0 of 1 workers with 1 core each: the job begins as soon as" in caplog.text
