"""The offload folder is private, each job has its own, and what a dead job left goes."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_tools import ON_DISK, PROMPTS, environment

from h2o_flexgen import LLM, Policy, SamplingParams
from h2o_flexgen.errors import UserError
from h2o_flexgen.offload.disk import OffloadFolder, cache_root, default_root

pytest_plugins = ["cli_tools"]

DISK = Policy(2, 2, tuple(map(float, ON_DISK)))


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def abandoned(root, name: str = "h2o_flexgen-job-dead"):
    """What a job that was killed leaves."""
    left = root / name
    left.mkdir(parents=True)
    (left / "lock").write_text("")
    (left / "kv_cache").write_bytes(b"x" * 10_000)
    return left


def test_it_is_private_and_goes_when_it_is_closed(tmp_path):
    before = os.umask(0)
    try:
        folder = OffloadFolder(tmp_path / "a" / "root")
    finally:
        os.umask(before)
    assert mode(folder.root) == 0o700 and mode(folder.path) == 0o700
    assert mode(folder.path / "lock") == 0o600
    folder.file("kv", 100)
    assert sorted(os.listdir(folder.path)) == ["kv", "lock"]
    folder.close()
    folder.close()
    assert os.listdir(folder.root) == []


def test_two_jobs_have_two_folders(tmp_path):
    one, two = OffloadFolder(tmp_path), OffloadFolder(tmp_path)
    assert one.path != two.path
    one.file("kv", 10)
    two.close()
    OffloadFolder(tmp_path).close()
    assert (one.path / "kv").exists()
    one.close()
    assert os.listdir(tmp_path) == []


def test_a_folder_whose_owner_is_dead_is_swept(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from h2o_flexgen.offload.disk import OffloadFolder;"
        "f = OffloadFolder(Path(sys.argv[1])); f.file('kv', 5000); print(f.path, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == -9
    assert sorted(os.listdir(done.stdout.strip())) == ["kv", "lock"]
    OffloadFolder.sweep(tmp_path)
    assert os.listdir(tmp_path) == []


def test_what_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "h2o_flexgen-job-file").write_text("a file of that name")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").write_text("")
    (tmp_path / "h2o_flexgen-job-link").symlink_to(tmp_path / "elsewhere")
    new = tmp_path / "h2o_flexgen-job-new"  # somebody is about to lock it
    new.mkdir()
    abandoned(tmp_path)
    OffloadFolder.sweep(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {
        "notes.txt",
        "h2o_flexgen-job-file",
        "elsewhere",
        "h2o_flexgen-job-link",
        "h2o_flexgen-job-new",
    }
    assert (tmp_path / "elsewhere" / "lock").exists()
    old = time.time() - 3600
    os.utime(new, (old, old))
    OffloadFolder.sweep(tmp_path)
    assert not new.exists()


def test_sweeping_where_nothing_is(tmp_path):
    (tmp_path / "file").write_text("")
    for where in (tmp_path / "none", tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        OffloadFolder.sweep(where)


def test_a_folder_is_never_seen_with_a_lock_that_nobody_holds(tmp_path, monkeypatch):
    """Another job may sweep at any moment of the making: between any two system calls of it."""
    real_open, real_flock = os.open, fcntl.flock

    def sweeping(real):
        def call(*args, **more):
            result = real(*args, **more)
            monkeypatch.undo()
            OffloadFolder.sweep(tmp_path)
            patch()
            return result

        return call

    def patch():
        monkeypatch.setattr(os, "open", sweeping(real_open))
        monkeypatch.setattr(fcntl, "flock", sweeping(real_flock))

    patch()
    folder = OffloadFolder(tmp_path)
    monkeypatch.undo()
    assert sorted(os.listdir(folder.path)) == ["lock"]
    folder.file("kv", 10)
    folder.close()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(fd, how):
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match="offload_dir"):
        OffloadFolder(tmp_path)
    assert os.listdir(tmp_path) == []


def test_where_it_is_by_default(tmp_path, monkeypatch):
    for name in ("H2O_FLEXGEN_OFFLOAD", "H2O_FLEXGEN_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root() == tmp_path / ".cache" / "h2o_flexgen" / "offload"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "h2o_flexgen"
    monkeypatch.setenv("H2O_FLEXGEN_HOME", str(tmp_path / "mine"))
    assert default_root() == tmp_path / "mine" / "offload"
    monkeypatch.setenv("H2O_FLEXGEN_OFFLOAD", str(tmp_path / "fast"))
    assert default_root() == tmp_path / "fast" and cache_root() == tmp_path / "mine"


def test_a_user_without_a_home(tmp_path, monkeypatch):
    for name in ("H2O_FLEXGEN_OFFLOAD", "H2O_FLEXGEN_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(UserError, match="H2O_FLEXGEN_HOME"):
        default_root()
    monkeypatch.setenv("H2O_FLEXGEN_HOME", str(tmp_path))
    assert default_root() == tmp_path / "offload"


# jobs


def test_a_job_sweeps_at_its_start_even_if_it_offloads_nothing(generate, model, tmp_path):
    left = abandoned(tmp_path / "generate.offload")
    generate("--model", model)
    assert not left.exists()


def test_a_job_runs_in_a_private_folder_of_its_own(model, tmp_path, monkeypatch):
    seen = []
    real = OffloadFolder.file

    def file(self, name, nbytes):
        seen.append((name, mode(self.root), mode(self.path)))
        return real(self, name, nbytes)

    monkeypatch.setattr(OffloadFolder, "file", file)
    with LLM(str(model), DISK, path="_DUMMY_", progress=False, offload_dir=tmp_path / "off") as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=3))
        assert {name for name, _, _ in seen} == {"weights", "kv_cache", "activations"}
        assert {modes for _, *modes in map(tuple, seen) for modes in [tuple(modes)]} == {(0o700, 0o700)}
    assert os.listdir(tmp_path / "off") == []


def test_two_jobs_on_one_folder_do_not_disturb_each_other(model, tmp_path):
    """Each starts, runs and ends while the other's files are in the folder."""
    prompts, params = PROMPTS, SamplingParams(max_tokens=5, ignore_eos=True)

    def tokens(llm):
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]

    options = {"path": "_DUMMY_", "device": "cpu", "dtype": "float32", "progress": False, "offload_dir": tmp_path}
    with LLM(str(model), DISK, **options) as one:
        first = tokens(one)
        files = set(os.listdir(tmp_path))
        with LLM(str(model), DISK, **options) as two:
            assert tokens(two) == first
            assert files < set(os.listdir(tmp_path))
            assert tokens(one) == first
        assert set(os.listdir(tmp_path)) == files
        assert tokens(one) == first
    assert os.listdir(tmp_path) == []


def test_a_closed_llm_holds_no_file_and_no_thread(model, tmp_path):
    import gc
    import threading

    def held():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def job(path=None):
        with LLM(str(model), DISK, path=path, progress=False, offload_dir=tmp_path) as llm:
            llm.generate(PROMPTS, SamplingParams(max_tokens=3))
            llm.generate(PROMPTS[:2], SamplingParams(max_tokens=3))

    job()
    before = held()
    for _ in range(3):
        job()
        job("_DUMMY_")
    assert held() == before


def test_after_an_error_the_next_job_of_the_same_llm_runs(model, tmp_path, monkeypatch):
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    options = {"device": "cpu", "dtype": "float32", "progress": False, "offload_dir": tmp_path}
    with LLM(str(model), DISK, **options) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
        calls, real = iter(range(10**9)), os.pwrite

        def full(fd, data, offset):
            if next(calls) > 10:
                raise OSError(28, os.strerror(28))
            return real(fd, data, offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(UserError, match="No space left"):
                llm.generate(PROMPTS, params)
        assert os.listdir(tmp_path) == []
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)] == expected
    assert os.listdir(tmp_path) == []
