"""Tools of the tests: the limit of CPU seconds, the folder of compiled programs, and mutants."""

import os
import random
from types import SimpleNamespace

import cpu_seconds
import mutate
import program_cache
import pytest


def report(name, seconds, *marks, shared=0.0):
    numbers = {"cpu": seconds, "shared": shared, "programs": 0}
    return SimpleNamespace(
        when="call",
        nodeid=name,
        keywords=dict.fromkeys(marks, 1),
        user_properties=[*numbers.items()],
    )


@pytest.mark.parametrize(("seconds", "fails"), [(5.9, False), (6.1, True)])
def test_tests_above_the_limit_are_listed_and_far_above_fail(seconds, fails):
    measured = cpu_seconds.CpuSeconds(6.0)
    for row in (
        report("a::slow", 9.0, "slow"),
        report("a::full", 9.0, "full"),
        report("a::short", 1.9),
    ):
        measured.pytest_runtest_logreport(row)
    measured.pytest_runtest_logreport(report("a::long", seconds, shared=11.0))
    assert measured.above(1) == [(11.0, "a, shared fixtures"), (seconds, "a::long")]
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    measured.pytest_sessionfinish(session)
    assert session.exitstatus == (pytest.ExitCode.TESTS_FAILED if fails else pytest.ExitCode.OK)


def test_the_oldest_programs_go(tmp_path):
    for age, name in enumerate(("new", "older", "oldest")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "program").write_bytes(bytes(10))
        os.utime(tmp_path / name / "program", (1e9 - age, 1e9 - age))
    program_cache.trim(tmp_path, 20)
    assert [path.parent.name for path in sorted(tmp_path.rglob("program"))] == ["new", "older"]


def test_every_module_has_tests_that_mutants_meet():
    assert [
        path for path in mutate.modules(mutate.ROOT) if not mutate.tests_of(path, mutate.ROOT)
    ] == []
    assert [
        path
        for path in mutate.TESTED_BY
        if not (mutate.ROOT / f"{path.replace('.', '/')}.py").exists()
    ] == []


def test_a_stored_mutant_is_found_by_the_text_of_its_line(tmp_path):
    module = tmp_path / "module.py"
    module.write_text("a = 1 + b\nc = 2 * d\n")
    rows = [
        mutate.stored(mutant, tmp_path)
        for mutant in mutate.draw(random.Random(0), 2, tmp_path, ["module.py"])
    ]
    module.write_text("import b\n\na = 1 + b\nc = 3 * d\n")
    for row in rows:
        mutant, is_stored = mutate.restored(row, random.Random(0), tmp_path)
        old, new = mutate.mutated(mutant, tmp_path)[1:]
        assert old != new
        assert is_stored == (row["text"] == old == "a = 1 + b")
