"""Tools of the tests: the limit of CPU seconds, and the folder of compiled programs."""

import os
from types import SimpleNamespace

import cpu_seconds
import program_cache
import pytest


def report(name, seconds, *marks, shared=0.0):
    numbers = {"cpu": seconds, "shared": shared, "programs": 0}
    return SimpleNamespace(
        when="call", nodeid=name, keywords=dict.fromkeys(marks, 1), user_properties=[*numbers.items()]
    )


@pytest.mark.parametrize(("seconds", "fails"), [(5.9, False), (6.1, True)])
def test_tests_above_the_limit_are_listed_and_far_above_fail(seconds, fails):
    measured = cpu_seconds.CpuSeconds(6.0)
    for row in (report("a::slow", 9.0, "slow"), report("a::full", 9.0, "full"), report("a::short", 1.9)):
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
