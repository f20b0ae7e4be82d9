"""From a figure's configuration to files: what the command lines of both packages share.

A figure is a module with `STEM`, `Config`, `compute`, `draw`, `arrays`, `describe`, `table` and `headline`.
"""

import dataclasses
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import jax
import platformdirs
import tyro

from dissociation import plotting
from dissociation.figures.artifacts import save_arrays, save_description

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Where and how a figure is made."""

    out: Path = Path("results")
    """Folder for the figure (PDF and PNG), its arrays (.npz), and the description of the run (.json)."""
    seed: int = 37
    """Everything random follows from it."""
    quick: Flag = False
    """A small run that shows that everything works: it overrides the sizes above."""
    resume: Flag = False
    """Go on with an interrupted run of the same settings; without it, its finished parts are set aside, and those that
    were set aside before are lost."""
    silent: Flag = False
    """Show no progress."""


def produce(figure: ModuleType, config: Any, run: RunOptions, *, program: str = "dissociation") -> int:
    """Computes, draws, writes and reports one figure.

    Args:
        figure: The figure's module.
        config: Its configuration.
        run: Where and how.
        program: The command's name, for messages.

    Returns:
        The exit status: 0, 1 for data that cannot be read or settings that cannot be met, 130 for an interrupt.
    """
    began = time.perf_counter()
    config = config.quick() if run.quick else config
    compiling = start_compilation_cache()
    parts = run.out / f".{figure.STEM}-{'quick-' if run.quick else ''}parts"
    if not run.resume and parts.exists():
        aside = parts.with_name(f"{parts.name}-before")
        shutil.rmtree(aside, ignore_errors=True)
        parts.rename(aside)
    try:
        data = figure.source(config)
    except (OSError, ValueError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    try:
        results = figure.compute(
            config,
            key=jax.random.PRNGKey(run.seed),
            dataset=data,
            folder=parts,
            progress=None if run.silent else "terminal",
        )
    except KeyboardInterrupt:
        print(f"\nStopped. Add --resume to go on; finished parts are in {parts}.", file=sys.stderr)
        return 130
    stem = run.out / figure.STEM
    pictures = plotting.save_figure(figure.draw(results), stem)
    save_arrays(stem.with_suffix(".npz"), figure.arrays(results))
    seconds = time.perf_counter() - began
    description = figure.describe(results) | {
        "seed": run.seed,
        "seconds": results.seconds | {"this call": seconds, "compiling": compiling["seconds"]},
    }
    save_description(stem.with_suffix(".json"), description)
    print(f"\n{figure.headline(results)}\n")
    print(aligned(figure.table(results)))
    compiled = f"{compiling['seconds']:.1f} s went into compiling {compiling['programs']} programs"
    print(f"\n{seconds:.0f} s; {compiled} ({compiling['cached']} more came from {cache_folder()}).")
    print("Wrote " + ", ".join(str(path) for path in [*pictures, stem.with_suffix(".npz"), stem.with_suffix(".json")]))
    return 0


def cache_folder() -> Path:
    """Where compiled programs are kept from one run to the next."""
    return Path(platformdirs.user_cache_dir("dissociation")) / "xla"


def start_compilation_cache() -> dict[str, Any]:
    """Turns JAX's persistent cache on and returns a tally of compilations that keeps itself up to date."""
    jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    tally = {"seconds": 0.0, "programs": 0, "cached": 0}

    def on_duration(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            tally["seconds"] += duration_secs
            tally["programs"] += 1

    def on_event(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            tally["cached"] += 1
            tally["programs"] -= 1

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    jax.monitoring.register_event_listener(on_event)
    return tally


def aligned(rows: list[list[str]]) -> str:
    """A table as text, columns as wide as their widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
