"""Groups of a sweep trained ahead by the workers of an executor, which `submit(function, *arguments)` reaches.

Functions and arrays are written once to the sweep's folder. A task is the path of this file, its
digest and the number of a group; what it trains is in the group's checkpoint, where the caller
finds it finished.
"""

import hashlib
import json
import pickle
import platform
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dissociation._core import checks, files
from dissociation.training import _interrupts as interrupts
from dissociation.training._plan import Plan, planned
from dissociation.training._progress import MeterFactory, open_meter
from dissociation.training._records import Callback
from dissociation.training._sweep_folder import MANIFEST, SweepFolder, group_file, plan_of

TASKS = "tasks.pickle"
"""File with the functions and arrays of a sweep."""
PACKAGES = ("jax", "jaxlib", "equinox", "optax", "numpy", "dissociation")
"""Packages whose versions are the same in a worker."""
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
"""Settings of JAX that a worker takes from the caller."""

_one_group = threading.Lock()


def _machine() -> dict[str, str]:
    """Return what must be equal in a worker, for results to be equal."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    return {"Python": platform.python_version(), **versions, "backend": jax.default_backend()}


@contextmanager
def submitting(executor: Any, folder: Path, contents: tuple[Any, ...]) -> Iterator["Tasks"]:
    """Write what tasks need to the folder, and yield the tasks; remove it afterwards."""
    try:
        import cloudpickle
    except ImportError as error:
        wanted = 'be used with the extra "executor": pip install "dissociation[executor]"'
        checks.fail("executor", wanted, f"no {error.name}")
    path = folder / TASKS
    header = {
        "machine": _machine(),
        "settings": {name: jax.config.values[name] for name in SETTINGS},
    }
    written = json.dumps(header).encode() + b"\n" + cloudpickle.dumps(contents)
    files.write_bytes(path, written)
    try:
        yield Tasks(executor, path, _digest(written))
    finally:
        path.unlink(missing_ok=True)
        for steps in folder.glob("group-*.steps"):
            steps.unlink(missing_ok=True)


def _digest(contents: bytes) -> str:
    return hashlib.blake2b(contents, digest_size=16).hexdigest()


class Tasks:
    """Tasks of one sweep, submitted to an executor."""

    def __init__(self, executor: Any, path: Path, digest: str):
        self.executor, self.path, self.digest = executor, path, digest

    def _submit(self, index: int | None) -> Any:
        """Return the future of a group, or of the plan; None if the executor takes no task."""
        try:
            return self.executor.submit(run_task, str(self.path.absolute()), self.digest, index)
        except Exception as error:
            checks.warn(f"`executor` took no task ({error!r}): it is done here.")
            return None

    def _outcome(self, future: Any) -> tuple[Any, str | None]:
        """Return result and error of a task that has ended; neither if the executor has lost it."""
        try:
            return future.result()
        except Exception as error:
            checks.warn(f"`executor` lost a task ({error!r}): it is done here.")
            return None, None

    def plan(self) -> Plan | None:
        """Return the plan that a worker makes, or None if it is lost."""
        future = self._submit(None)
        if future is None:
            return None
        while not future.done():
            _wait()
        plan, error = self._outcome(future)
        if error is not None:
            raise RuntimeError(f"A worker could not plan the sweep. It raised:\n{error}")
        return None if plan is None else Plan(**plan)

    def train(self, plan: Plan, num_steps: int, progress: str | MeterFactory | None) -> None:
        """Train the groups that are not finished; those that are lost are left as they are."""
        folder, steps = self.path.parent, dict.fromkeys(range(len(plan.groups)), num_steps)
        futures = {}
        for index in steps:
            if not group_file(folder, index, "trained").exists():
                futures[index] = self._submit(index)
        errors = []
        with closing(open_meter(progress, num_steps * len(steps), f"{plan}, in workers")) as meter:
            while futures:
                for index, future in list(futures.items()):
                    steps[index] = _steps_of(group_file(folder, index, "steps"))
                    if future is not None and not future.done():
                        continue
                    del futures[index]
                    error = None if future is None else self._outcome(future)[1]
                    if error is None:
                        steps[index] = num_steps
                    else:
                        errors.append(f"members {plan.groups[index]}:\n{error}")
                meter.advance(sum(steps.values()), f"{len(futures)} of {len(steps)} groups left")
                if futures:
                    _wait()
        if errors:
            raise RuntimeError("Training raised in workers, for\n" + "\n".join(errors))


def _wait() -> None:
    with interrupts.waiting():
        time.sleep(0.2)


def _steps_of(path: Path) -> int:
    """Return the number of steps that a worker has written."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def run_task(path: str, digest: str, index: int | None) -> tuple[Any, str | None]:
    """Train a group, or plan the sweep, in a worker; return the plan, and the traceback of an error."""
    with _one_group:
        before = {name: jax.config.values[name] for name in SETTINGS}
        try:
            sweep, memory_budget, num_groups, same_program = _read(Path(path), digest)
            if index is None:
                return planned(sweep, memory_budget, num_groups)._asdict(), None
            folder = Path(path).parent
            kept = SweepFolder(folder, json.loads((folder / MANIFEST).read_text()), {})
            members, how = plan_of(kept.manifest).groups[index], kept.how(sweep.how)
            steps, checkpoint = (group_file(folder, index, kind) for kind in ("steps", "ckpt"))
            while True:
                try:
                    sweep.fit(
                        members, how, checkpoint, _StepsFile(steps), same_program=same_program
                    )
                    return None, None
                except BlockingIOError:  # a task of an earlier call trains this group
                    time.sleep(1)
        except Exception:
            return None, traceback.format_exc()
        finally:
            for name, value in before.items():
                jax.config.update(name, value)


def _read(path: Path, digest: str) -> Any:
    """Return what `submitting` wrote, with the settings of its process."""
    contents = path.read_bytes()
    if _digest(contents) != digest:
        raise files.RefusedFile(f"{path} was written anew since this task was submitted.")
    header, pickled = contents.split(b"\n", 1)
    wanted = json.loads(header)
    _check_equal(wanted["machine"], _machine())
    for name, value in wanted["settings"].items():
        jax.config.update(name, value)
    _check_equal(wanted["settings"], {name: jax.config.values[name] for name in SETTINGS})
    return pickle.loads(pickled)


def _check_equal(wanted: dict[str, Any], found: dict[str, Any]) -> None:
    for name, value in wanted.items():
        if found[name] != value:
            raise RuntimeError(
                f"A worker must have {name} {value}, as the caller of fit_grid, got {found[name]}."
            )


class _StepsFile(Callback):
    """Number of steps in a file, written at most once a second."""

    def __init__(self, path: Path):
        self.path, self.written = path, -np.inf

    def advance(self, step: int, loss: np.ndarray) -> None:
        if time.monotonic() - self.written > 1:
            self.path.write_text(str(step))
            self.written = time.monotonic()
