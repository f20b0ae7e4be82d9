import errno
import fcntl
import os
import signal
import subprocess
import sys
from unittest.mock import MagicMock, Mock

import pytest

from dissociation._core import files


def test_a_file_has_the_permissions_of_any_new_file(tmp_path):
    path, before = tmp_path / "deep" / "file", os.umask(0o027)
    try:
        for contents in (b"one", b"two"):  # created, and replaced
            files.write_bytes(path, contents)
            assert (path.read_bytes(), path.stat().st_mode & 0o777) == (contents, 0o640)
    finally:
        os.umask(before)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, error):
    files.write_bytes(tmp_path / "file", b"old")

    def fail():
        with files.replacing(tmp_path / "file") as file:
            file.write(b"half of the new")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_bytes_are_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def call(*args, name=name, real=real):
            size = os.fstat(args[0]).st_size if name == "fsync" else None
            done.append((name, size))
            return real(*args)

        monkeypatch.setattr(files.os, name, call)
    files.write_bytes(tmp_path / "file", b"12345")
    assert done[:2] == [("fsync", 5), ("replace", None)]
    assert done[2][0] == "fsync"  # the folder


WRITER = """
import sys
from dissociation._core import files
with files.replacing(sys.argv[1]) as file:
    file.write(b"new" * 1000)
    file.flush()
    print("inside", flush=True)
    sys.stdin.read()
"""


def test_a_full_disk_keeps_the_old_file(small_disk):
    path = small_disk / "file"
    files.write_bytes(path, b"old")
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        files.write_bytes(path, b"n" * 200_000)
    assert [child.name for child in small_disk.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def test_a_lock_has_one_holder_and_ends_with_its_block(tmp_path):
    lock = tmp_path / "folder" / ".lock"
    lock.parent.mkdir()
    lock.write_text("process 1, which was killed")
    for _ in range(2):
        with files.locked(lock, "the run"):
            message = rf"the run is in use by process {os.getpid()} on .* Wait for it"
            with pytest.raises(BlockingIOError, match=message), files.locked(lock, "the run"):
                pass
            with files.locked(tmp_path / "other", "another"):
                pass
        assert not lock.exists()


def test_a_lock_that_its_holder_just_removed_is_made_anew(tmp_path, monkeypatch):
    lock = tmp_path / ".lock"
    first = [True]

    def samestat(*stats):
        if first.pop():
            first.append(False)
            lock.unlink()
            return False
        return first.append(False) or True

    monkeypatch.setattr(os.path, "samestat", samestat)
    with files.locked(lock, "the run"):
        assert lock.read_text().startswith(f"process {os.getpid()} on ")


def test_a_killed_write_leaves_the_old_file_and_the_next_one_removes_what_it_left(tmp_path):
    path, other = tmp_path / "file[1]", tmp_path / "file[1].b"
    kept = [tmp_path / f".{other.name}.0a1b2c3d.tmp", tmp_path / f".{path.name}.mine.tmp"]
    for each in (*kept, tmp_path / f".{path.name}.0a1b2c3d.tmp"):
        each.write_bytes(b"half")
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], **options) as process:
        assert process.stdout.readline() == b"inside\n"
        (alive,) = set(tmp_path.glob(".*.tmp")) - {*kept}
        files.write_bytes(path, b"old")  # beside a write that goes on
        assert {*tmp_path.iterdir()} == {path, alive, *kept}
        process.send_signal(signal.SIGKILL)
    assert path.read_bytes() == b"old"
    files.write_bytes(path, b"new")
    assert {*tmp_path.iterdir()} == {path, *kept}


def test_a_file_is_written_through_links(tmp_path):
    for name, target in (("good", tmp_path / "disk" / "a"), ("dangling", tmp_path / "new" / "b")):
        link = tmp_path / name
        link.symlink_to(target)
        if name == "good":
            files.write_bytes(target, b"old")
        files.write_bytes(link, b"new")
        assert link.is_symlink()
        assert [(child.name, child.read_bytes()) for child in target.parent.iterdir()] == [
            (target.name, b"new")
        ]
    with pytest.raises(IsADirectoryError, match="must be a file, got a folder: '.*new'"):
        files.write_bytes(tmp_path / "new", b"")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(
        OSError, match="must lead to a file, got a loop of symbolic links: '.*loop'"
    ):
        files.write_bytes(tmp_path / "loop", b"lost")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="must be a regular file, got a device or a pipe: '.*pipe'"):
        files.write_bytes(tmp_path / "pipe", b"")


def test_a_lock_is_no_link(tmp_path):
    lock, target = tmp_path / ".lock", tmp_path / "target"
    target.write_bytes(b"the user's")
    lock.symlink_to(target)
    with pytest.raises(OSError, match="symbolic links: '.*.lock'"), files.locked(lock, "the run"):
        pass
    assert target.read_bytes() == b"the user's"


def test_errors_of_locks_name_their_file(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, "no such luck")

    monkeypatch.setattr(fcntl, "flock", fails)
    with (
        pytest.raises(OSError, match=r"x\.lock") as caught,
        files.locked(tmp_path / "x.lock", "the run"),
    ):
        pass
    assert caught.value.filename == str(tmp_path / "x.lock")


def test_a_full_disk_names_the_lock(tmp_path, monkeypatch):
    lock = tmp_path / "x.lock"
    full = Mock(write=Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    monkeypatch.setattr(
        files, "_lock_file", lambda path, subject: (path.touch(), MagicMock(wraps=full))[1]
    )
    with (
        pytest.raises(OSError, match=r"No space left on device.*x\.lock"),
        files.locked(lock, "the run"),
    ):
        pass
    assert not lock.exists()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_files_are_written_and_a_warning_says_that_nothing_guards_them(
    tmp_path, monkeypatch, number
):
    def refused(*_):
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refused)
    files.write_bytes(tmp_path / "a", b"contents")
    assert (tmp_path / "a").read_bytes() == b"contents"
    living = tmp_path / ".a.01234567.tmp"  # perhaps of another process
    living.touch()
    files.write_bytes(tmp_path / "a", b"other")
    assert living.exists()
    words = "has no locks: nothing keeps another process from using the run"
    with pytest.warns(RuntimeWarning, match=words), files.locked(tmp_path / "lock", "the run"):
        pass
    assert not (tmp_path / "lock").exists()
