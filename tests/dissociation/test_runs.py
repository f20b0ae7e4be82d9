"""Records of runs."""

import json
import logging

import pytest

from dissociation.figures._runs import LOG, RECORD, recorded


def record_of(folder):
    return json.loads((folder / RECORD).read_text())


def test_runs_are_done_failed_stopped_and_running(tmp_path):
    with recorded(tmp_path / "good", ["python", "-m", "dissociation", "two words"], {"settings": {"width": 3}}):
        logging.getLogger("dissociation.training").info("a plan")
        assert record_of(tmp_path / "good")["status"] == "running"
    with pytest.raises(ValueError, match="wrong"), recorded(tmp_path / "bad", ["b"], {}):
        raise ValueError("wrong")
    with pytest.raises(KeyboardInterrupt), recorded(tmp_path / "stopped", ["c"], {}):
        raise KeyboardInterrupt
    found = {path.name: record_of(path) for path in tmp_path.iterdir()}
    assert {name: kept["status"] for name, kept in found.items()} == {
        "good": "done", "bad": "failed", "stopped": "stopped",
    }  # fmt: skip
    assert found["good"]["command"] == "python -m dissociation 'two words'"
    assert found["bad"]["error"] == "ValueError: wrong"
    assert found["good"]["settings"] == {"width": 3}
    assert "a plan" in (tmp_path / "good" / LOG).read_text()
    assert "failed: ValueError: wrong" in (tmp_path / "bad" / LOG).read_text()
