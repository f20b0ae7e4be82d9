"""Training of a sweep's groups by an executor's workers, through `submit(function, *arguments)`.

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
    """Return versions and backend, which a worker must share for equal results."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    return {"Python": platform.python_version(), **versions, "backend": jax.default_backend()}


def _settings() -> dict[str, Any]:
    return {name: jax.config.values[name] for name in SETTINGS}


@contextmanager
def submitting(executor: Any, folder: Path, contents: tuple[Any, ...]) -> Iterator["Tasks"]:
    """Write a file for tasks to the folder, yield the tasks, and remove the file."""
    try:
        import cloudpickle
    except ImportError as error:
        checks.fail(
            "executor",
            'be used with the extra "executor": pip install "dissociation[executor]"',
            f"no {error.name}",
        )
    path = folder / TASKS
    header = {"machine": _machine(), "settings": _settings()}
    file_bytes = json.dumps(header).encode() + b"\n" + cloudpickle.dumps(contents)
    files.write_bytes(path, file_bytes)
    try:
        yield Tasks(executor, path, _digest(file_bytes))
    finally:
        path.unlink(missing_ok=True)
        for steps in folder.glob("group-*.steps"):
            steps.unlink(missing_ok=True)


def _digest(contents: bytes) -> str:
    return hashlib.blake2b(contents, digest_size=16).hexdigest()


class Tasks:
    """Tasks of one sweep, submitted to an executor."""

    def __init__(self, executor: Any, path: Path, digest: str):
        self.executor = executor
        self.path = path
        self.digest = digest

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
        folder = self.path.parent
        num_groups = len(plan.groups)
        steps_of_group = dict.fromkeys(range(num_groups), num_steps)
        futures = {}
        for index in range(num_groups):
            if not group_file(folder, index, "trained").exists():
                futures[index] = self._submit(index)

        errors = []
        description = f"{plan}, in workers"
        with closing(open_meter(progress, num_steps * num_groups, description)) as meter:
            while futures:
                for index, future in list(futures.items()):
                    steps_of_group[index] = _steps_of(group_file(folder, index, "steps"))
                    if future is not None and not future.done():
                        continue
                    del futures[index]
                    error = None if future is None else self._outcome(future)[1]
                    if error is None:
                        steps_of_group[index] = num_steps
                    else:
                        errors.append(f"members {plan.groups[index]}:\n{error}")
                text = f"{len(futures)} of {num_groups} groups left"
                meter.advance(sum(steps_of_group.values()), text)
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
    """Train a group, or plan the sweep, in a worker; return the plan, and an error's traceback."""
    with _one_group:
        earlier_settings = _settings()
        try:
            sweep, memory_budget, num_groups, same_program = _read(Path(path), digest)
            if index is None:
                return planned(sweep, memory_budget, num_groups)._asdict(), None
            folder = Path(path).parent
            manifest = json.loads((folder / MANIFEST).read_text())
            members = plan_of(manifest).groups[index]
            how = SweepFolder(folder, manifest, {}).how(sweep.how)
            checkpoint = group_file(folder, index, "ckpt")
            steps_file = _StepsFile(group_file(folder, index, "steps"))
            while True:
                try:
                    sweep.fit(members, how, checkpoint, steps_file, same_program=same_program)
                    return None, None
                except BlockingIOError:  # a task of an earlier call trains this group
                    time.sleep(1)
        except Exception:
            return None, traceback.format_exc()
        finally:
            for name, setting in earlier_settings.items():
                jax.config.update(name, setting)


def _read(path: Path, digest: str) -> Any:
    """Return the contents that `submitting` wrote, with the settings of its process."""
    contents = path.read_bytes()
    if _digest(contents) != digest:
        raise files.RefusedFile(f"{path} was written anew since this task was submitted.")
    header, pickled = contents.split(b"\n", 1)
    caller = json.loads(header)
    _check_equal(caller["machine"], _machine())
    for name, setting in caller["settings"].items():
        jax.config.update(name, setting)
    _check_equal(caller["settings"], _settings())
    return pickle.loads(pickled)


def _check_equal(caller: dict[str, Any], worker: dict[str, Any]) -> None:
    for name, setting in caller.items():
        if worker[name] != setting:
            raise RuntimeError(
                f"A worker must have {name} {setting}, as the caller of fit_grid, "
                f"got {worker[name]}."
            )


class _StepsFile(Callback):
    """Number of steps in a file, written at most once a second."""

    def __init__(self, path: Path):
        self.path = path
        self.written_at = -np.inf

    def advance(self, step: int, loss: np.ndarray) -> None:
        if time.monotonic() - self.written_at > 1:
            self.path.write_text(str(step))
            self.written_at = time.monotonic()
