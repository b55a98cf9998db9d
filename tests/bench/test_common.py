"""Shared parts of the benchmarks: result files, the scratch folder, the memory cap."""

import fcntl
import json
import os
import tempfile

import pytest

from bench import common, memory_cap
from bench.memory_cap import MemoryCap


def test_json_is_short_and_loses_nothing():
    data = {"a": [1, 2, 3], "b": {"c": None, "d": "x" * 100}, "e": [{"f": 1.5, "g": []}] * 9}
    text = common.to_json(data)
    assert json.loads(text) == data
    assert max(map(len, text.splitlines())) < 120 and '"a": [1, 2, 3]' in text


def test_a_result_records_its_origin_and_is_written_atomically(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    common.save("x", {"a": 1 / 3})
    before = (tmp_path / "x.json").read_text()
    assert json.loads(before)["a"] == 0.333333 and {"command", "commit", "date", "machine"} <= json.loads(before).keys()
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError):
        common.save("x", {"a": 2})
    assert (tmp_path / "x.json").read_text() == before and len(list(tmp_path.iterdir())) == 1


def test_a_damaged_result_file_is_named_in_the_error(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    (tmp_path / "x.json").write_text('{"row": ')
    with pytest.raises(SystemExit, match="x.json is damaged"):
        common.load_result("x")


def test_the_recorded_command_has_no_paths_of_this_machine(monkeypatch):
    monkeypatch.setattr("sys.argv", [str(common.ROOT / "bench" / "run.py"), "opt-1.3b 64+256"])
    assert common.command() == "python -m bench.run 'opt-1.3b 64+256'"
    monkeypatch.setattr("sys.argv", [str(common.ROOT / "scripts" / "bench_engine.py"), "ram"])
    assert common.command() == "python scripts/bench_engine.py ram"
    monkeypatch.setattr("sys.argv", [str(common.ROOT / "bench" / "versions.py"), "equal", "--checkout", "/a/b/older"])
    assert common.command() == "python -m bench.versions equal --checkout older"


def test_only_one_benchmark_runs_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(SystemExit, match="another benchmark"), common.scratch():
        pass
    os.close(lock)
    with common.scratch() as folder:
        assert folder.parent == common.data_folder()
    assert not folder.exists()


def test_an_unwritable_scratch_folder_is_named_in_the_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("H2O_FLEXGEN_HOME", str(tmp_path / "file"))
    with pytest.raises(SystemExit, match="file/bench .*H2O_FLEXGEN_HOME"), common.scratch():
        pass


def test_without_a_cap_the_kernel_says_whether_a_kill_was_for_lack_of_memory(monkeypatch):
    kills = 3
    monkeypatch.setattr(memory_cap, "oom_kills", lambda path: kills)
    with MemoryCap(None) as cap:
        assert not cap.killed()
        kills = 4
        assert cap.killed()


@pytest.mark.parametrize("v1", [True, False], ids=["v1", "v2"])
def test_the_cap_is_a_memory_cgroup_of_either_version(tmp_path, monkeypatch, v1):
    root = tmp_path / "memory" if v1 else tmp_path
    root.mkdir(exist_ok=True)
    (root / "h2o_flexgen-killed").mkdir()
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    monkeypatch.setattr(memory_cap, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory_cap, "SWAPS", tmp_path / "swaps")
    limit, events = ("memory.limit_in_bytes", "memory.oom_control") if v1 else ("memory.max", "memory.events")
    with MemoryCap(1 << 30) as cap:
        (folder,) = root.glob("h2o_flexgen-*")  # the killed benchmark's cgroup is gone
        assert (tmp_path / "cgroup.subtree_control").read_text() == ("cpu" if v1 else "+memory")
        assert (folder / limit).read_text() == str(1 << 30)
        inside = cap.run(["sh", "-c", "echo $$"], capture_output=True, text=True)
        assert (folder / "cgroup.procs").read_text() == inside.stdout  # it entered before it became the program
        for count in (0, 1):
            (folder / events).write_text(f"under_oom 0\noom_kill {count}\n")
            assert cap.killed() == bool(count)


@pytest.mark.parametrize("counted", [True, False])
def test_nothing_runs_if_swap_would_get_around_the_cap(tmp_path, monkeypatch, counted):
    monkeypatch.setattr(memory_cap, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory_cap, "SWAPS", tmp_path / "swaps")
    (tmp_path / "swaps").write_text("Filename Type Size\n/swapfile file 8388604\n")
    (tmp_path / "cgroup.subtree_control").write_text("memory")
    folder = tmp_path / "made"
    folder.mkdir()
    monkeypatch.setattr("tempfile.mkdtemp", lambda **_: str(folder))
    if counted:
        (folder / "memory.swap.max").touch()
        MemoryCap(1 << 30)
        assert (folder / "memory.swap.max").read_text() == "0"
    else:
        with pytest.raises(SystemExit, match="counts no swap"):
            MemoryCap(1 << 30)


def test_nothing_runs_uncapped_if_a_cgroup_cannot_be_created(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_cap, "CGROUPS", tmp_path / "none")
    with pytest.raises(SystemExit, match="cannot create a memory cgroup .* run as root"):
        MemoryCap(1 << 30)
