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
from contextlib import closing, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

from dissociation._core import checks, files
from dissociation.training._interrupts import waiting
from dissociation.training._plan import Plan
from dissociation.training._progress import open_meter
from dissociation.training._records import Callback
from dissociation.training._sweep_folder import MANIFEST, SweepFolder, group_file

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


def _environment() -> Any:
    """Return versions, backend and settings, which a worker must share for equal results."""
    environment = {name: metadata.version(name) for name in PACKAGES}
    environment["Python"] = platform.python_version()
    environment["backend"] = jax.default_backend()
    return environment | {name: jax.config.values[name] for name in SETTINGS}


@contextmanager
def submitting(executor: Any, folder: Path, contents: Any) -> Any:
    """Write a file for tasks to the folder, yield the tasks, and remove the file."""
    cloudpickle = checks.import_extra("cloudpickle", "`executor`", "executor")
    path = folder.absolute() / TASKS
    file_bytes = pickle.dumps((_environment(), cloudpickle.dumps(contents)))
    files.write_bytes(path, file_bytes)
    try:
        yield Tasks(executor, path, hashlib.sha256(file_bytes).hexdigest())
    finally:
        for file in folder.glob("tasks*"):
            file.unlink()


class Tasks(NamedTuple):
    """Tasks of one sweep, for an executor."""

    executor: Any
    path: Path
    digest: str

    def run(self, names: Any, show: Any) -> Any:
        """Run tasks and return the last result, None if the executor has lost it.

        Args:
            names: Names of the tasks, by index, for errors.
            show: Function that is called with the indices of the tasks that run.
        """
        futures = {}
        for index in names:
            try:
                futures[index] = self.executor.submit(run_task, self.path, self.digest, index)
            except Exception as error:
                checks.warn(f"`executor` took no task ({error!r}): it is done here.")
        result = None
        errors = ""
        while futures:
            with waiting():
                time.sleep(0.2)
            for index in list(futures):
                if futures[index].done():
                    try:
                        result, error = futures.pop(index).result()
                        if error:
                            errors += f"\n{names[index]}:\n{error}"
                    except Exception as error:
                        checks.warn(f"`executor` lost a task ({error!r}): it is done here.")
            show(futures)
        if errors:
            raise RuntimeError(f"Workers raised, for{errors}")
        return result

    def train(self, plan: Plan, num_steps: int, progress: Any) -> None:
        """Train the groups that are not finished; those that are lost are left as they are."""
        folder = self.path.parent
        total = len(plan.groups)
        names = {
            i: f"members {members}"
            for i, members in enumerate(plan.groups)
            if not group_file(folder, i, "trained").exists()
        }

        def show(running: Any):
            step = num_steps * (total - len(running))
            for index in running:
                with suppress(OSError, ValueError):  # not written, or not completely
                    step += int((folder / f"tasks-{index}").read_text())
            meter.advance(step, f"{len(running)} of {total} groups left")

        with closing(open_meter(progress, num_steps * total, f"{plan}, in workers")) as meter:
            self.run(names, show)


def run_task(path: Path, digest: str, index: int | None) -> Any:
    """Train a group, or plan the sweep, in a worker; return the plan, and an error's traceback."""
    with _one_group:
        earlier = {name: jax.config.values[name] for name in SETTINGS}
        try:
            make_plan, sweep, same_program = _read(path, digest)
            if index is None:
                return make_plan(), None
            folder = path.parent
            sweep_folder = SweepFolder(folder, json.loads((folder / MANIFEST).read_text()), {})
            steps = _Steps(folder / f"tasks-{index}")
            while True:
                try:
                    sweep_folder.fit(index, sweep, steps, same_program)
                    return None, None
                except BlockingIOError:  # a task of an earlier call trains this group
                    time.sleep(1)
        except Exception:
            return None, traceback.format_exc()
        finally:
            for name, setting in earlier.items():
                jax.config.update(name, setting)


def _read(path: Path, digest: str) -> Any:
    """Return the contents that `submitting` wrote, with the settings of its process."""
    contents = path.read_bytes()
    if hashlib.sha256(contents).hexdigest() != digest:
        raise files.RefusedFile(f"{path} was written anew since this task was submitted.")
    environment, pickled = pickle.loads(contents)
    for name, setting in environment.items():
        if name in SETTINGS:  # after versions and backend
            jax.config.update(name, setting)
        received = _environment()[name]
        if received != setting:
            raise RuntimeError(
                f"A worker must have {name} {setting}, as the caller of fit_grid, got {received}."
            )
    return pickle.loads(pickled)


class _Steps(Callback):
    """Number of steps in a file, written at most once a second."""

    due = 0.0

    def __init__(self, path: Path):
        self.path = path

    def advance(self, step: int, loss: Any):
        if time.monotonic() > self.due:
            self.path.write_text(str(step))
            self.due = time.monotonic() + 1
