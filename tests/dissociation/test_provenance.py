"""What a run depended on, as far as the process can tell, and its record."""

import json
import logging
import shutil
import subprocess
from importlib import metadata

import jax
import numpy as np
import psutil
import pytest

from dissociation.figures import _provenance as provenance


def test_versions_devices_and_switches(monkeypatch):
    jax.devices()  # before the flag, which no backend knows
    monkeypatch.setenv("XLA_FLAGS", "--xla_something=1")
    found = provenance.environment()
    assert found["jax"] == metadata.version("jax")
    assert len(found["devices"]) == len(jax.devices())
    assert found["XLA_FLAGS"] == "--xla_something=1"
    assert found["jax_enable_x64"] is False
    assert json.loads(json.dumps(found)) == found
    monkeypatch.delenv("XLA_FLAGS")
    assert "XLA_FLAGS" not in provenance.environment()


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_the_commit_of_a_checkout_and_none_elsewhere(tmp_path, monkeypatch):
    package = tmp_path / "top" / "dissociation"
    package.mkdir(parents=True)
    monkeypatch.setattr(provenance, "__file__", str(package / "figures" / "_provenance.py"))
    assert provenance.commit() is None

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", "-C", package.parent, *who, *words], capture_output=True, text=True, check=True
        )

    git("init", "-q")
    assert provenance.commit() is None  # nothing is committed
    (package / "a").write_text("a")
    git("add", ".")
    git("commit", "-qm", "a")
    assert provenance.commit() == git("rev-parse", "HEAD").stdout[:12]
    (package / "a").write_text("b")
    assert provenance.commit() == git("rev-parse", "HEAD").stdout[:12] + "-dirty"


def test_the_peak_of_memory_never_falls():
    before = provenance.peak_memory()["host"]
    most = 2**26
    free = before - psutil.Process().memory_info().rss  # an earlier test may have had more
    held = np.ones((max(free, 0) + 2 * most) // 8)
    after = provenance.peak_memory()["host"]
    assert after > before + most
    del held
    assert provenance.peak_memory()["host"] >= after


def record_of(folder):
    return json.loads((folder / provenance.RECORD).read_text())


def test_runs_are_done_failed_stopped_and_running(tmp_path):
    with provenance.recorded(
        tmp_path / "good", ["python", "-m", "dissociation", "two words"], {"settings": {"width": 3}}
    ):
        logging.getLogger("dissociation.training").info("a plan")
        assert record_of(tmp_path / "good")["status"] == "running"
    with pytest.raises(ValueError, match="wrong"), provenance.recorded(tmp_path / "bad", ["b"], {}):
        raise ValueError("wrong")
    with pytest.raises(KeyboardInterrupt), provenance.recorded(tmp_path / "stopped", ["c"], {}):
        raise KeyboardInterrupt
    found = {path.name: record_of(path) for path in tmp_path.iterdir()}
    assert {name: kept["status"] for name, kept in found.items()} == {
        "good": "done", "bad": "failed", "stopped": "stopped",
    }  # fmt: skip
    assert found["good"]["command"] == "python -m dissociation 'two words'"
    assert found["bad"]["error"] == "ValueError: wrong"
    assert found["good"]["settings"] == {"width": 3}
    assert "a plan" in (tmp_path / "good" / provenance.LOG).read_text()
    assert "failed: ValueError: wrong" in (tmp_path / "bad" / provenance.LOG).read_text()
