"""Copies of a model's files: identified by contents, checked before use, and made again if they are damaged."""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import pwd
import shutil
import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from h2o_flexgen.errors import UserError
from h2o_flexgen.utils import copies
from h2o_flexgen.utils.copies import RECORD, SMALL, converted
from h2o_flexgen.utils.files import PIECE, PIECES, samples

pytest_plugins = ["command_tools"]


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(100))
    return path


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "home" / "converted"


class Copier:
    """Makes copies with the bytes of their source, and counts them."""

    def __init__(self):
        self.count = 0

    def __call__(self, source: Path, kind: str = "kind") -> Path:
        def make(folder: Path) -> None:
            self.count += 1
            (folder / "below").mkdir()
            (folder / "below" / "small").write_bytes(source.read_bytes())
            with open(folder / "large", "wb") as file:
                file.write(source.read_bytes())
                file.truncate(SMALL + 1)

        folder = converted([source], kind, make)
        assert (folder / "below" / "small").read_bytes() == source.read_bytes()
        return folder


@pytest.fixture
def copy() -> Copier:
    return Copier()


def names(root: Path) -> set[str]:
    return set(os.listdir(root)) - {"lock"}


# identity


def test_a_copy_is_found_after_its_source_has_moved(copy, source, root):
    folder = copy(source)
    moved = source.rename(source.with_name("moved"))
    assert copy(moved) == folder and copy.count == 1
    assert names(root) == {folder.name}


def test_other_bytes_of_the_same_size_and_time_make_another_copy(copy, source, root):
    before = source.stat()
    folder = copy(source)
    source.write_bytes(os.urandom(before.st_size))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert copy(source) != folder and copy.count == 2


def test_an_edit_of_one_byte_in_a_large_file_makes_another_copy(copy, source, root):
    os.truncate(source, 64 << 20)
    folder = copy(source)
    with open(source, "r+b") as file:
        file.seek((3 << 20) + 7)
        file.write(b"x")
    assert copy(source) != folder


def test_a_copy_without_a_record_is_removed(copy, source, root):
    (root / ("0" * 16)).mkdir(parents=True)
    folder = copy(source)
    assert names(root) == {folder.name}


def test_a_copy_of_earlier_contents_is_removed(copy, source, root):
    other = source.with_name("other")
    other.write_bytes(b"other")
    stay = {copy(source, "another kind").name, copy(other).name}
    old = copy(source)
    assert names(root) == stay | {old.name}
    source.write_bytes(b"new")
    assert names(root) - stay == {old.name}
    new = copy(source)
    assert names(root) == stay | {new.name} and new != old


@pytest.mark.parametrize("size", [1, 2, PIECE, PIECE + 1, PIECE * PIECES])
def test_a_change_of_one_byte_is_noticed_in_a_small_file(tmp_path, size):
    path = tmp_path / "file"
    found = set()
    for at in range(0, size, max(1, size // 7)):
        content = bytearray(size)
        content[at] = 1
        path.write_bytes(content)
        found.add(samples(path))
    assert len(found) == len(range(0, size, max(1, size // 7)))


@pytest.mark.parametrize("at", [0, 107 << 20, (480 << 20) - 1])
def test_a_change_of_some_mebibytes_is_noticed_in_a_large_file(tmp_path, at):
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 480 << 20)
    before = samples(path)
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(b"x" * min(8 << 20, (480 << 20) - at))
    assert samples(path) != before


# damage


def overwrite(path: Path, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(content)


def replace_by_link(path: Path) -> None:
    moved = path.rename(path.parent.parent / "moved")
    path.symlink_to(moved)


DAMAGES = {
    "a file is gone": lambda folder: (folder / "large").unlink(),
    "a file is cut short": lambda folder: os.truncate(folder / "large", SMALL),
    "a header has changed": lambda folder: overwrite(folder / "large", b"xxxx"),
    "a small file has changed": lambda folder: overwrite(folder / "below" / "small", b"xxxx"),
    "a file is a pipe": lambda folder: [(folder / "large").unlink(), os.mkfifo(folder / "large")],
    "a file is a link": lambda folder: replace_by_link(folder / "large"),
    "a file is a folder": lambda folder: [(folder / "large").unlink(), (folder / "large").mkdir()],
    "there is one more file": lambda folder: (folder / "more.safetensors").touch(),
    "it is a file": lambda folder: [shutil.rmtree(folder), folder.touch()],
    "it is a link to nowhere": lambda folder: [shutil.rmtree(folder), folder.symlink_to("nowhere")],
    "it is a link to another folder": lambda folder: [shutil.rmtree(folder), folder.symlink_to(folder.parent.parent)],
    "the record is gone": lambda folder: (folder / RECORD).unlink(),
    "the record is garbage": lambda folder: (folder / RECORD).write_bytes(b"\xff"),
    "the record lists nothing": lambda folder: (folder / RECORD).write_text("{}"),
    "the record nests too deep": lambda folder: (folder / RECORD).write_text("[" * 100_000),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_copy_is_made_again(copy, source, root, caplog, damage):
    folder = copy(source)
    damage(folder)
    assert copy(source) == folder and copy.count == 2
    assert "is damaged: making it again" in caplog.text
    assert copy(source) == folder and copy.count == 2
    assert names(root) - {"moved"} == {folder.name}


@pytest.mark.parametrize("damage", ["link", "file", "folder"])
def test_an_unfinished_copy_is_replaced_whatever_it_is(copy, source, root, tmp_path, damage):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").touch()
    root.mkdir(parents=True, mode=0o700)
    if damage == "link":
        (root / "partial").symlink_to(victim)
    elif damage == "file":
        (root / "partial").touch()
    else:
        (root / "partial" / "below").mkdir(parents=True)
    folder = copy(source)
    assert names(root) == {folder.name}
    assert os.listdir(victim) == ["precious"]


def test_foreign_folders_are_left_alone(copy, source, root):
    (root / "foreign").mkdir(parents=True, mode=0o700)
    (root / "foreign" / "notes").write_text("mine")
    copy(source)
    assert (root / "foreign" / "notes").read_text() == "mine"


def test_a_copy_in_a_read_only_folder_is_used(copy, source, mount, monkeypatch):
    folder = mount("-t", "tmpfs", "tmpfs")
    folder.chmod(0o700)
    monkeypatch.setenv("H2O_FLEXGEN_HOME", str(folder))
    made = copy(source)
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    assert copy(source) == made and copy.count == 1
    with pytest.raises(OSError) as raised:
        copy(source, "another kind")
    assert raised.value.errno == errno.EROFS


def test_a_full_disk_leaves_existing_copies_alone(source, root, copy):
    def fill(folder: Path) -> None:
        (folder / "half").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = copy(source)
    with pytest.raises(OSError):
        converted([source], "another kind", fill)
    assert names(root) == {folder.name}


# other processes, and other users


def test_waiting_for_another_process_is_logged_once(copy, source, root, caplog, monkeypatch):
    folder = copy(source)
    shutil.rmtree(folder)
    with open(root / "lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waits = threading.Event()
        monkeypatch.setattr(copies.time, "sleep", lambda seconds: waits.set())
        thread = threading.Thread(target=copy, args=(source,))
        thread.start()
        assert waits.wait(30)
        fcntl.flock(lock, fcntl.LOCK_UN)
        thread.join(30)
    assert caplog.text.count("waiting for another process") == 1
    assert copy.count == 2 and names(root) == {folder.name}


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe"])
def test_a_lock_that_is_not_a_regular_file_is_neither_followed_nor_waited_for(copy, source, root, tmp_path, kind):
    root.mkdir(parents=True, mode=0o700)
    victim = tmp_path / "victim"
    if kind == "pipe":
        os.mkfifo(root / "lock")
    else:
        (root / "lock").symlink_to(victim)
    if kind == "link":
        victim.write_text("precious")
    with pytest.raises(OSError, match="it is a link|it is not a regular file|No such device"):
        copy(source)
    assert victim.read_text() == "precious" if kind == "link" else not victim.exists()


@pytest.mark.parametrize("which, mode", [("home", 0o777), ("converted", 0o770)])
def test_a_folder_that_others_may_write_is_refused(copy, source, root, which, mode):
    copy(source)
    folder = root if which == "converted" else root.parent
    try:
        os.chown(folder, -1, 54321)
    except PermissionError:
        if mode == 0o770:
            pytest.skip("only root can give it to another group")
    folder.chmod(mode)
    with pytest.raises(UserError, match=f"other users may write in the cache folder {folder}: chmod go-w"):
        copy(source)
    folder.chmod(mode & ~0o022)
    copy(source)
    folder.chmod(mode | 0o1000)  # sticky: others may add files, but not replace this user's
    copy(source)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("which", ["home", "converted", "link"])
def test_a_folder_of_another_user_is_refused(copy, source, root, tmp_path, which):
    copy(source)
    if which == "link":
        root.rename(tmp_path / "real")
        root.symlink_to(tmp_path / "real")
        copy(source)
        os.chown(root, 54321, -1, follow_symlinks=False)
    else:
        os.chown(root if which == "converted" else root.parent, 54321, -1)
    with pytest.raises(UserError, match="belongs to another user: name a new folder of your own"):
        copy(source)


USER = pwd.getpwuid(os.geteuid()).pw_name


@pytest.mark.parametrize(
    "name, members, is_refused",
    [(USER, [], False), (USER, [USER], False), (USER, ["other"], True), ("staff", [], True), (None, [], True)],
)
def test_a_user_may_have_a_group_to_itself(copy, source, root, monkeypatch, name, members, is_refused):
    """With a umask of 002 folders are writable by a group, which then has only their owner."""

    def group(gid: int) -> SimpleNamespace:
        if name is None:
            raise KeyError(gid)
        return SimpleNamespace(gr_name=name, gr_mem=members)

    monkeypatch.setattr(grp, "getgrgid", group)
    copy(source)
    root.parent.chmod(0o775)
    with pytest.raises(UserError, match="other users may write") if is_refused else nullcontext():
        copy(source)


def test_folders_are_made_for_their_user_alone(copy, source, tmp_path, monkeypatch):
    monkeypatch.setenv("H2O_FLEXGEN_HOME", str(tmp_path / "a" / "b"))
    before = os.umask(0)
    try:
        copy(source)
    finally:
        os.umask(before)
    made = [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "converted"]
    assert {oct(folder.stat().st_mode & 0o777) for folder in made} == {"0o700"}
