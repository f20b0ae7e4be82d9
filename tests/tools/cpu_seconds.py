"""Measure the CPU seconds and the programs of each test; a plugin of pytest, which `tests/conftest.py` registers.

A test's seconds are those of this process and of children that it waited for, without the set-up of
shared fixtures. With `TEST_CPU_LIMIT=6`, tests without a mark above 2 seconds are listed at the
end, and above 6 the run fails.
"""

import importlib
import os
import pkgutil
import resource
from collections import defaultdict

import pytest
from compiled import num_compiled

LIMIT = 2.0
"""CPU seconds of a test without mark."""
SHARED_LIMIT = 10.0
"""CPU seconds of the set-up of shared fixtures of a module."""


def cpu_seconds():
    """Return the CPU seconds of this process and of the children that it waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class CpuSeconds:
    """Attach `cpu`, `shared` and `programs` to the report of each test, and list tests above the limit."""

    def __init__(self, limit):
        self.limit = limit
        self.shared = 0.0
        self.seconds = {}
        self.shared_seconds = defaultdict(float)

    def pytest_collection_finish(self):
        """Import all modules, so that no test pays for it."""
        for package in ("dissociation", "koopman") if self.limit else ():
            folder = importlib.import_module(package).__path__
            for module in pkgutil.walk_packages(folder, f"{package}."):
                if not module.name.endswith("__main__"):
                    importlib.import_module(module.name)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        start = cpu_seconds()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self.shared += cpu_seconds() - start

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item):
        self.shared = 0.0
        item.stash[START] = (cpu_seconds(), num_compiled())
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item):
        try:
            return (yield)
        finally:
            seconds, programs = item.stash[START]
            spent = cpu_seconds() - seconds - self.shared
            numbers = {"cpu": spent, "shared": self.shared, "programs": num_compiled() - programs}
            item.user_properties += [(name, round(number, 3)) for name, number in numbers.items()]

    def pytest_runtest_logreport(self, report):
        numbers = dict(report.user_properties)
        if report.when != "call" or "cpu" not in numbers:
            return
        if not {"slow", "full"} & set(report.keywords):
            self.seconds[report.nodeid] = numbers["cpu"]
            self.shared_seconds[report.nodeid.partition("::")[0]] += numbers["shared"]

    def above(self, factor):
        """Return the tests, and the modules' shared fixtures, above a multiple of their limits."""
        rows = [
            (seconds, name) for name, seconds in self.seconds.items() if seconds > factor * LIMIT
        ]
        for module, seconds in self.shared_seconds.items():
            if seconds > factor * SHARED_LIMIT:
                rows.append((seconds, f"{module}, shared fixtures"))
        return sorted(rows, reverse=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        if (
            self.limit
            and self.above(self.limit / LIMIT)
            and session.exitstatus == pytest.ExitCode.OK
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if not self.limit or not (rows := self.above(1.0)):
            return
        terminalreporter.section(
            f"CPU seconds: {len(rows)} above {LIMIT:.0f}; the run fails above {self.limit:.0f}"
        )
        for seconds, name in rows:
            terminalreporter.write_line(f"{seconds:7.1f} {name}")


START = pytest.StashKey()


def register(config):
    """Register the measurement with pytest."""
    config.pluginmanager.register(
        CpuSeconds(float(os.environ.get("TEST_CPU_LIMIT", 0))), "cpu_seconds"
    )
