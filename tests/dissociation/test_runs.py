"""Records of runs, and their list."""

import json
import logging

import pytest

from dissociation.figures.artifacts import locked
from dissociation.figures.runs import LOG, RECORD, recorded, runs_in, table_of


def test_runs_are_done_failed_running_and_gone(tmp_path):
    with recorded(tmp_path / "good", ["python", "-m", "dissociation", "two words"], {"settings": {"width": 3}}):
        logging.getLogger("dissociation.training").info("a plan")
    with pytest.raises(ValueError, match="wrong"), recorded(tmp_path / "bad", ["b"], {}):
        raise ValueError("wrong")
    with pytest.raises(KeyboardInterrupt), recorded(tmp_path / "stopped", ["c"], {}):
        raise KeyboardInterrupt
    (tmp_path / "deep" / "gone").mkdir(parents=True)
    kept = json.loads((tmp_path / "good" / RECORD).read_text())
    (tmp_path / "deep" / "gone" / RECORD).write_text(json.dumps({**kept, "status": "running"}))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / RECORD).write_text("{")
    with locked(tmp_path / "now"), recorded(tmp_path / "now", ["d"], {}):
        found = {entry.folder.name: entry for entry in runs_in(tmp_path)}
    assert {name: entry.status for name, entry in found.items()} == {
        "good": "done", "bad": "failed", "stopped": "stopped", "gone": "stopped", "now": "running", "broken": "broken",
    }  # fmt: skip
    assert found["good"].command == "python -m dissociation 'two words'"
    assert found["bad"].error == "ValueError: wrong"
    assert kept["settings"] == {"width": 3}
    assert "a plan" in (tmp_path / "good" / LOG).read_text()
    assert "failed: ValueError: wrong" in (tmp_path / "bad" / LOG).read_text()
    rows = table_of(list(found.values()))
    assert {len(row) for row in rows} == {5}
    assert sum("ValueError: wrong" in row for row in rows) == 1


def test_a_list_of_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="`out` must be a folder with runs"):
        runs_in(tmp_path / "none")
    assert runs_in(tmp_path) == []
