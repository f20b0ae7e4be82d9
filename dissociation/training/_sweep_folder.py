"""Folder of a sweep: the manifest with its plan, and the files of its groups."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import PyTree

from dissociation._core import checks, files
from dissociation.training import _checkpoint_file as checkpoints
from dissociation.training._fitting import FitResult, fit
from dissociation.training._partition import Partition, Threads
from dissociation.training._plan import Plan, Sweep
from dissociation.training._records import Callback

SWEEP_FORMAT = 2
"""Format of the manifest."""
MANIFEST = "sweep.json"
"""File with the settings, groups and layout of a sweep."""


@contextmanager
def opened(
    folder: str | Path | None, identity: dict[str, Any], fresh: bool
) -> Iterator["SweepFolder"]:
    """Lock the folder of a sweep, and yield it with its manifest."""
    if folder is None:
        yield SweepFolder(None, {"identity": identity}, {})
        return
    path = Path(folder)
    with files.locked(path / ".lock", path):
        stored_identity = json.loads(json.dumps(identity))
        manifest = _manifest(path, stored_identity, fresh)
        yield SweepFolder(path, manifest, {})


def _manifest(folder: Path, identity: dict[str, Any], fresh: bool) -> dict[str, Any]:
    """Return the manifest of a folder, or a new one; if `fresh`, move the folder's files first."""
    path = folder / MANIFEST
    if fresh and path.exists():
        _set_aside([*folder.glob("group-*"), path], folder)
    if not path.exists():
        return {"format": SWEEP_FORMAT, "identity": identity}
    advice = "Name another folder, or pass fresh=True."
    with files.reading(path, advice, "is broken, or of another version of this package"):
        manifest = json.loads(path.read_text())
        stored = dict(manifest["identity"])
        members = sorted(member for group in plan_of(manifest).groups for member in group)
        if members != list(range(len(members))):
            raise ValueError("its groups do not hold each member once")
        Partition(1, "auto", "auto", "auto").resumed(manifest["layout"])
        if manifest.get("format") != SWEEP_FORMAT:
            raise ValueError(f"its format is {manifest.get('format')}, not {SWEEP_FORMAT}")
    different = [name for name in identity if stored.get(name) != identity[name]]
    if different:
        differ = checks.that_differ(different)
        raise files.RefusedFile(
            f"`folder` must hold the same sweep, got {folder}, whose {differ}. {advice}"
        )
    return manifest


def _set_aside(paths: list[Path], folder: Path) -> None:
    """Move files to the first new subfolder `before-1`, `before-2` and so on."""
    number = 1
    while (folder / f"before-{number}").exists():
        number += 1
    subfolder = folder / f"before-{number}"
    subfolder.mkdir()
    for path in paths:
        path.rename(subfolder / path.name)


def plan_of(manifest: dict[str, Any]) -> Plan:
    """Return the plan that a manifest holds."""
    stored = manifest["plan"]
    groups = tuple(map(tuple, stored["groups"]))
    return Plan(**{**stored, "groups": groups})


def group_file(folder: Path, index: int, kind: str) -> Path:
    """Return the path of a group's file."""
    return folder / f"group-{index:04d}.{kind}"


class SweepFolder(NamedTuple):
    """Manifest and trained groups of a sweep, on disk or, without a path, in memory."""

    path: Path | None
    manifest: dict[str, Any]
    groups: dict[int, PyTree]  # trained models and `aux`, without a path

    def plan(self, make: Callable[[], Plan], how: dict[str, Any], num_groups: int | None) -> Plan:
        """Return the stored plan, or store a new one, and how its members are mapped."""
        if "plan" not in self.manifest:
            plan = make()
            partition = Partition(1, **how)
            if partition.mesh == "auto":
                partition = partition._replace(mesh=Threads(plan.devices))
            self.manifest.update(plan=plan._asdict(), layout=partition.stored())
            if self.path is not None:
                text = json.dumps(self.manifest) + "\n"
                files.write_bytes(self.path / MANIFEST, text.encode())
        plan = plan_of(self.manifest)
        if num_groups is not None and len(plan.groups) < num_groups:
            checks.fail(
                "folder",
                f"have a plan of at least {num_groups} groups",
                f"{self.path} of {len(plan.groups)}",
                "Leave out `num_groups`, or pass fresh=True",
            )
        return plan

    def how(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return mapping and mesh with "auto" entries from the manifest."""
        partition = Partition(1, **arguments).resumed(self.manifest["layout"])
        return {name: getattr(partition, name) for name in arguments}

    def fit(
        self, index: int, sweep: Sweep, callback: Callback, same_program: bool = False
    ) -> FitResult:
        """Train a group, or read it from a finished checkpoint."""
        models, arguments = sweep.arguments(plan_of(self.manifest).groups[index])
        return fit(
            models,
            sweep.step,
            sweep.sampler,
            **arguments,
            **self.how(sweep.how),
            save=sweep.save,
            callbacks=[callback],
            checkpoint=self.file(index, "ckpt"),
            same_program=same_program,
        )

    def file(self, index: int, kind: str) -> Path | None:
        """Return the path of a group's file."""
        if self.path is None:
            return None
        return group_file(self.path, index, kind)

    def finish(self, index: int, trained: PyTree) -> None:
        """Store a group's trained models and `aux`."""
        path = self.file(index, "trained")
        if path is None:
            self.groups[index] = jax.device_get(trained)
        else:
            checkpoints.save(path, trained)

    def trained(self, index: int, sweep: Sweep, plan: Plan) -> PyTree:
        """Return a group's trained models and `aux`."""
        path = self.file(index, "trained")
        if path is None:
            return self.groups[index]
        models, aux, _ = eqx.filter_eval_shape(sweep.start, list(plan.groups[index]))
        return checkpoints.restore(path, (models, aux))
