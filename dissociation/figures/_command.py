"""Command lines of both packages.

Every run has a folder, which only the same command with the same data resumes.
"""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import jax
import platformdirs
import tyro
import xarray

from dissociation._core.checks import WrongValue, check_seed
from dissociation._core.datasets import as_json, save_results
from dissociation._core.files import RefusedFile, locked, write_bytes
from dissociation.figures import _cache as caches
from dissociation.figures import _provenance as provenance
from dissociation.figures._harness import Figure, decoded
from dissociation.figures._report import Exhibit, exhibit_of, report_html
from dissociation.plotting import _axes as plotting
from dissociation.rewrites._certificate import Certificate
from dissociation.training import _interrupts as interrupts

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]

DEFAULT_SEED = 37

_LONGEST_NAME = 60


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of a run: folder, seed, resuming."""

    out: Path = Path("results")
    """Folder with a folder per run: the figure (PDF and PNG), arrays (.npz), a description (.json),
    a report of all (report.html), and the parts from which an interrupted run resumes."""
    seed: int = DEFAULT_SEED
    """Seed of all randomness."""
    quick: Flag = False
    """Make a smoke run, with small sizes unless they are given as well."""
    resume: Flag = False
    """Fail if no earlier run has these settings. Without this flag, resume it or start one."""
    fresh: Flag = False
    """Start from scratch, and set aside the parts of an earlier run with the same settings."""
    silent: Flag = False
    """Show no progress."""

    def __post_init__(self):
        check_seed("seed", self.seed)
        if self.fresh and self.resume:
            raise WrongValue("`fresh` must not be given together with `resume`.")


def run_command(
    figures: Mapping[str, Figure],
    arguments: Sequence[str] | None,
    *,
    program: str,
    description: str,
) -> int:
    """Run the command line of a package.

    Args:
        figures: Figures by command name.
        arguments: Words after the program's name; None takes those of the process.
        program: Name of the command.
        description: Purpose of the program, for `--help`.

    Returns:
        The exit status: 0, 1 after an error, 2 for a wrong value, 130 or 143 after an interrupt.

    Raises:
        SystemExit: After `--help`; with status 2 if an option or value is wrong, which is printed.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    with _until_readers_leave():
        if words == ["--version"]:
            print(f"{program} (dissociation {metadata.version('dissociation')})")
            return 0
        commands = {name: _command(figure, words, program) for name, figure in figures.items()}
        if words and words[0] in commands:
            name, *options = words
            run_figure = tyro.cli(commands[name], prog=f"{program} {name}", args=options)
        else:
            run_figure = tyro.extras.subcommand_cli_from_dict(
                commands, prog=program, description=description, args=words
            )
        return run_figure()
    return 0


@contextlib.contextmanager
def _until_readers_leave() -> Iterator[None]:
    """End the block without an error if the reader of the output has left, as after `| head`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())


def _command(
    figure: Figure, words: Sequence[str], program: str
) -> Callable[..., Callable[[], int]]:
    """Return a function of a figure's options, from which tyro makes the command."""
    default = figure.Config()
    # With `--quick`, the defaults in `--help` are those of a smoke run.
    if "--quick" in words:
        default = default.quick()

    def choose(
        config: tyro.conf.OmitArgPrefixes[figure.Config] = default,  # pyright: ignore
        run: tyro.conf.OmitArgPrefixes[RunOptions] = RunOptions(),  # noqa: B008
    ) -> Callable[[], int]:
        return partial(produce, figure, config, run, program=program, words=words)

    choose.__doc__ = figure.SHOWS
    return choose


def produce(
    figure: Figure,
    config: Any,
    run: RunOptions,
    *,
    program: str = "dissociation",
    words: Sequence[str] = (),
) -> int:
    """Compute, draw and write one figure; return the exit status."""
    began = time.perf_counter()
    interrupts.begin()
    interrupts.advice = interrupts.NOTHING
    try:
        try:
            if not run.silent:
                print(f"{program}: compiling", file=sys.stderr, flush=True)
            data = figure.source(config)
        except (OSError, ValueError) as error:
            status = 2 if isinstance(error, WrongValue) else 1
            return _print_error(program, str(error), status)
        _run(figure, config, run, data, ("python", "-m", program, *words), began)
    except BrokenPipeError:  # `run_command` ends quietly
        raise
    except (OSError, WrongValue, RefusedFile, MemoryError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            message = f"{error} (while writing to {run.out})"
        return _print_error(program, message, 1)
    except (Exception, KeyboardInterrupt) as error:
        # A compiler can turn an interrupt into another exception.
        if isinstance(error, KeyboardInterrupt) or interrupts.heard():
            print(f"\n{program}: stopped. {interrupts.advice}", file=sys.stderr)
            return interrupts.status()
        message = str(error)
        if "RESOURCE_EXHAUSTED" in message:
            advice = "out of memory; choose smaller sizes."
            return _print_error(program, f"{advice} {message.splitlines()[0]}", 1)
        raise
    return 0


def _print_error(program: str, message: str, status: int) -> int:
    """Print a message on one line and return `status`."""
    line = " ".join(message.split())
    print(f"{program}: {line}", file=sys.stderr)
    return status


def _run(
    figure: Figure, config: Any, run: RunOptions, data: Any, words: Sequence[str], began: float
) -> None:
    """Compute, draw and write one figure in the folder of its run."""
    key = jax.random.PRNGKey(run.seed)
    identity = caches.identity_of(config, key, data)
    folder = run.out / run_name(figure, run, identity)
    with contextlib.ExitStack() as stack:
        _take_folder(run, folder, stack)
        interrupts.advice = f"The same command resumes; finished parts are in {folder / 'parts'}."
        facts = {
            "figure": figure.STEM,
            **identity,
            "seed": run.seed,
            "environment": provenance.environment(),
        }
        resuming_words = [word for word in words if word != "--fresh"]
        stack.enter_context(provenance.recorded(folder, resuming_words, facts))
        compiling = start_compilation_cache()
        progress = None if run.silent else "terminal"
        cache = stack.enter_context(caches.Cache(folder / "parts", identity, progress))
        dataset = figure.compute(config, key=key, data=data, cache=cache)

        seconds = {
            **cache.seconds,
            "this call": time.perf_counter() - began,
            "compiling": compiling["seconds"],
        }
        origin = {"command": shlex.join(words), "seed": run.seed}
        names = _write(figure, folder, dataset, cache.network, origin, seconds)
        total = f"{seconds['this call']:.0f} s"
        programs = f"compiling {compiling['programs']} programs"
        compiled = f"{compiling['seconds']:.1f} s went into {programs}"
        cache_dir = jax.config.values["jax_compilation_cache_dir"]
        print(f"\n{total}; {compiled} ({compiling['cached']} more came from {cache_dir}).")
        print(f"Wrote {', '.join(names)} in {folder}", flush=True)


def _take_folder(run: RunOptions, folder: Path, stack: contextlib.ExitStack) -> None:
    """Lock the folder of a run; with `--fresh` rename earlier parts."""
    cache_path = folder / "parts"
    if run.resume and not (cache_path / caches.IDENTITY).exists():
        requirement = "`resume` must find an earlier run of the same settings"
        raise RefusedFile(f"{requirement}, got none in {folder}.")
    stack.enter_context(locked(folder / ".lock", folder))
    if not cache_path.exists():
        return
    if run.fresh:
        number = 1
        while (folder / f"parts-before-{number}").exists():
            number += 1
        cache_path.rename(folder / f"parts-before-{number}")
    elif not run.silent:
        print(f"Resuming in {folder} (--fresh starts from scratch).", file=sys.stderr)


def _write(
    figure: Figure,
    folder: Path,
    dataset: xarray.Dataset,
    network: Any,
    origin: Mapping[str, Any],
    seconds: Mapping[str, float],
) -> list[str]:
    """Draw a figure, write its files, print its table, and return the names of the files."""
    stem = folder / figure.STEM
    exhibit = exhibit_of(figure, dataset)
    environment = provenance.environment()
    images = plotting.save_figure(exhibit.figure, stem)
    arrays = save_results(dataset, stem.with_suffix(".npz"))

    attributes = {name: decoded(value) for name, value in dataset.attrs.items()}
    axes = {name: array.dims for name, array in dataset.variables.items()}
    facts = {"seed": origin["seed"], "axes": axes, "seconds": seconds, "environment": environment}
    document = json.dumps(as_json(attributes | facts))
    # JSON has no NaN and no infinity.
    strict = json.loads(document, parse_constant=lambda _: None)
    description = stem.with_suffix(".json")
    write_bytes(description, (json.dumps(strict, indent=2) + "\n").encode())

    sections = certificates_of(dataset)
    sections["settings"] = attributes["config"]
    if network is not None:
        sections["one of the networks"] = network
    sections["run"] = {**origin, **environment}
    for name, size in provenance.peak_memory().items():
        sections["run"][f"peak on {name} (MiB)"] = round(size / 2**20)
    sections["seconds"] = seconds
    report = folder / "report.html"
    page = report_html(figure.SHOWS.rstrip("."), [exhibit], sections)
    write_bytes(report, page.encode())
    paths = [*images, arrays, description, report]
    if getattr(figure, "HAS_MARKDOWN", False):
        paths.append(stem.with_suffix(".md"))
        write_bytes(paths[-1], markdown_of(exhibit).encode())
    print(f"\n{exhibit.text()}")
    return [path.name for path in paths]


def markdown_of(exhibit: Exhibit) -> str:
    """Return headline, table and caption as Markdown."""
    header, *rows = exhibit.table
    lines = []
    for cells in (header, ["---"] * len(header), *rows):
        escaped = [" ".join(cell.replace("|", "\\|").split()) for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |")
    table = "\n".join(lines)
    return f"{exhibit.headline}\n\n{table}\n\n{exhibit.caption}\n"


def certificates_of(dataset: xarray.Dataset) -> dict[str, Any]:
    """Return a section of a report with the variants' certificates; empty without certificates."""
    if "max_abs_change" not in dataset:
        return {}
    table = dataset[list(Certificate._fields)].to_dataframe()
    return {"certificates on the test images": table.to_dict("index")}


def run_name(figure: Figure, run: RunOptions, identity: Mapping[str, Any]) -> str:
    """Return the name of a run's folder: figure, settings that differ from defaults, and a hash.

    The hash is of figure, identity and the package's version.
    """
    default = figure.Config()
    words = [figure.STEM]
    if run.quick:
        default = default.quick()
        words.append("quick")
    if run.seed != DEFAULT_SEED:
        words.append(f"seed-{run.seed}")
    default_settings = as_json(default)
    for name, value in identity["config"].items():
        if value != default_settings[name]:
            values = value if isinstance(value, list) else [value]
            words.append("-".join([name, *map(str, values)]))
    folder_name = re.sub(r"[^\w.-]+|_(?=_)", "-", "_".join(words))
    folder_name = folder_name[:_LONGEST_NAME].rstrip("-_.")
    settings = {**identity, "figure": figure.STEM, "version": metadata.version("dissociation")}
    digest = caches.digest_of(settings)
    return f"{folder_name}_{digest[:10]}"


def cache_folder() -> Path:
    """Return the folder of compiled programs."""
    return Path(platformdirs.user_cache_dir("dissociation")) / "xla"


def start_compilation_cache() -> dict[str, Any]:
    """Enable JAX's persistent cache, and return a tally of compilations, which JAX updates."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
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
