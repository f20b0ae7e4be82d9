"""Every core a device: how many there are, and when it is too late."""

import subprocess
import sys

import jax
import pytest

import dissociation
from dissociation.cores import available_cores, use_all_cores


def in_a_process_of_its_own(code):
    """What it prints, without the tests' four devices."""
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    return run.stdout + run.stderr


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", None), ("100000 100000", 1), ("150000 100000", 2), ("10000 100000", 1), ("?", None)],
)
def test_a_quota_is_a_limit(tmp_path, monkeypatch, quota, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(5)), raising=False)
    (tmp_path / "cpu.max").write_text(quota)
    assert available_cores(tmp_path / "cpu.max") == (cores or 5)
    assert available_cores(tmp_path / "none") == 5


@pytest.mark.slow
def test_devices_are_cores():
    code = """
import jax, dissociation
dissociation.use_all_cores()
from dissociation.cores import available_cores
print(jax.local_device_count() == available_cores())
dissociation.use_all_cores()  # as often as one likes
"""
    assert in_a_process_of_its_own(code) == "True\n"


@pytest.mark.slow
def test_it_can_be_too_late():
    code = """
import jax.numpy as jnp
import dissociation.cores
jnp.zeros(1)
dissociation.cores.available_cores = lambda: 3
dissociation.use_all_cores()
"""
    said = in_a_process_of_its_own(code)
    assert "use_all_cores() must be called before JAX computes anything, got 1 device(s)" in said
    assert "for 3 cores. Restart the process (in a notebook, the kernel)" in said


def test_enough_devices_are_left_alone(monkeypatch):
    monkeypatch.setattr("dissociation.cores.available_cores", lambda: 3)
    assert jax.local_device_count() == 4  # and have started
    dissociation.use_all_cores()
    assert jax.local_device_count() == 4
    assert dissociation.use_all_cores is use_all_cores
    with pytest.raises(AttributeError, match="no attribute 'use_no_cores'"):
        _ = dissociation.use_no_cores
