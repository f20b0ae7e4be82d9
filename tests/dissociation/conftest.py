"""Disks where this user may mount one."""

import subprocess

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 96 KiB."""
    yield from mounted(tmp_path / "disk", "size=96k")


@pytest.fixture
def locked_disk(tmp_path):
    """A disk that cannot be written, by root neither."""
    yield from mounted(tmp_path / "disk", "ro")


def mounted(folder, option):
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        done = False
    if not done:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
