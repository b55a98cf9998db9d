"""What a job offloads is private, separate from other jobs, and gone however the job ends."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from command_tools import ON_DISK, PROMPTS

from h2o_flexgen import LLM, Policy, SamplingParams
from h2o_flexgen.errors import UserError
from h2o_flexgen.storage.disk import OffloadFolder, default_root
from h2o_flexgen.utils.files import cache_root

pytest_plugins = ["command_tools"]

DISK = Policy(2, 2, tuple(map(float, ON_DISK)))


def test_the_folder_is_private_and_shows_no_file(tmp_path):
    before = os.umask(0)
    try:
        folder = OffloadFolder(tmp_path / "a" / "root")
        file = folder.file("kv", 100)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.root.stat().st_mode) == 0o700
    assert stat.S_IMODE(os.fstat(file.fd).st_mode) == 0o600
    assert os.listdir(folder.root) == [] and os.fstat(file.fd).st_nlink == 0
    folder.close()
    folder.close()


def test_two_jobs_have_files_of_their_own(tmp_path):
    one = OffloadFolder(tmp_path)
    two = OffloadFolder(tmp_path)
    file = one.file("kv", 10)
    other = two.file("kv", 10)
    file.write_at(memoryview(b"one's text"), 0)
    other.write_at(memoryview(b"two's text"), 0)
    two.close()
    read = bytearray(10)
    file.read_at(memoryview(read), 0)
    assert read == b"one's text"


def test_bytes_on_disk_are_counted_until_their_file_is_closed(tmp_path):
    folder = OffloadFolder(tmp_path)
    files = [folder.file("kv", 5000), folder.file("activations", 300)]
    assert folder.size() == 5300
    files[0].close()
    assert folder.size() == 300


@pytest.mark.parametrize("root", ["file", "file/below", "x" * 300, "/proc/none"])
def test_a_folder_that_cannot_be_made(tmp_path, root):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to the offload folder .*`offload_dir`"):
        OffloadFolder(tmp_path / root).file("kv", 10)


def test_the_default_folder(tmp_path, monkeypatch):
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


def test_what_a_job_offloads_goes_to_the_folder_it_names(model, tmp_path, monkeypatch):
    seen = []
    real = OffloadFolder.file

    def file(self, name, nbytes):
        seen.append(name)
        return real(self, name, nbytes)

    monkeypatch.setattr(OffloadFolder, "file", file)
    with LLM(str(model), DISK, path="_DUMMY_", progress=False, offload_dir=tmp_path / "off") as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=3))
        assert set(seen) == {"weights", "kv_cache", "activations"}
        assert stat.S_IMODE((tmp_path / "off").stat().st_mode) == 0o700
        held = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        assert any(name.startswith(str(tmp_path / "off" / "weights")) for name in held)


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
    job()
    job("_DUMMY_")
    assert held() == before
