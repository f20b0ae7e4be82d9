"""From a figure's configuration to files: what the command lines of both packages share.

A run of a figure has a folder of its own, named by figure, settings and a digest of all that defines the run, so
that other settings, other data or a rehearsal never touch its results, and the same command goes on where it stopped.
"""

import contextlib
import dataclasses
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import platformdirs
import tyro

from dissociation import checks, interrupts, plotting, provenance
from dissociation import distributed as processes
from dissociation.checks import WrongValue, check_seed
from dissociation.exhibits import Exhibit
from dissociation.exhibits import aligned as aligned  # notebooks print tables by it
from dissociation.figures import artifacts
from dissociation.figures.labels import families_of, flat_results_of
from dissociation.figures.protocol import Figure
from dissociation.figures.reporting import exhibit_of, report_of, sweep_report_of
from dissociation.figures.runs import recorded, runs_in, table_of
from dissociation.figures.sweep import TRAINED, config_grid, lists_in, names_of, stacked, words_of
from dissociation.files import RefusedFile, write_bytes
from dissociation.labelled import load_results, save_npz
from dissociation.sweeps import Grid

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]

DEFAULT_SEED = 37

_LONGEST_NAME = 60


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Where and how a figure is made."""

    out: Path = Path("results")
    """Folder in which every run has a folder of its own: the figure (PDF and PNG), its arrays (.npz), a description of
    the run (.json), a report with all of it (report.html), and the parts from which an interrupted run goes on."""
    seed: int = DEFAULT_SEED
    """Everything random follows from it."""
    quick: Flag = False
    """A small run that shows that everything works; sizes that are given as well hold."""
    resume: Flag = False
    """Go on with an earlier run of the same settings, and refuse to begin a new one. Without it the same command goes
    on as well, or begins if there is nothing to go on with."""
    fresh: Flag = False
    """Begin anew though there is an earlier run of the same settings, whose parts are set aside."""
    silent: Flag = False
    """Show no progress."""
    distributed: Flag = False
    """This is one of several processes that make the figure together, each its share of the networks. Where a cluster
    (SLURM, Open MPI, Kubernetes, TPU) does not say them, give the three options below. All need the same `--out`."""
    coordinator_address: str | None = None
    """Where process 0 listens to the others, host:port."""
    num_processes: int | None = None
    """How many processes there are."""
    process_id: int | None = None
    """Which of them this is, from 0."""
    heartbeat: int = processes.HEARTBEAT
    """Seconds after which a process that says nothing counts as dead, and the others end."""

    def __post_init__(self):
        check_seed("seed", self.seed)
        if self.fresh and self.resume:
            raise WrongValue("`fresh` must not be given together with `resume`.")
        given = (self.coordinator_address, self.num_processes, self.process_id)
        if not self.distributed and given != (None, None, None):
            raise WrongValue("`distributed` must be given where the address, number or id of processes is.")


def run_command(
    figures: Mapping[str, Figure], arguments: Sequence[str] | None, *, program: str, description: str
) -> int:
    """The command line of a package.

    Args:
        figures: By the command's name.
        arguments: The words after the program's name; None takes them from the process.
        program: The command's name.
        description: What it is for.

    Returns:
        The exit status, see `produce`; 2 for a wrong option or value.

    Raises:
        SystemExit: After `--help`.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    with _until_readers_leave():
        if words == ["--version"]:
            print(f"{program} (dissociation {metadata.version('dissociation')})")
            return 0
        figure = figures.get(words[0]) if words else None
        lists = {} if figure is None else lists_in(words, figure.Config())
        if figure is not None and (wrong := _not_swept(words, figure.Config())):
            print(f"{program}: {wrong}", file=sys.stderr)
            return 2
        commands = {name: _command(each, words, program) for name, each in figures.items()} | {"runs": _runs}

        def parsed(words: Sequence[str]) -> Any:
            return tyro.extras.subcommand_cli_from_dict(commands, prog=program, description=description, args=words)

        printed = io.StringIO()
        try:
            with contextlib.redirect_stderr(printed):
                chosen = [parsed(each) for each in words_of(words, lists)]
        except SystemExit as end:
            if end.code in (0, None):
                raise
            print(f"{program}: {_one_line(printed.getvalue())}", file=sys.stderr)
            return 2
        return _produce_all(chosen, lists, program, words) if lists else chosen[0]()
    return 0


@contextlib.contextmanager
def _until_readers_leave() -> Iterator[None]:
    """End the block without an error when the reader of the output has left, as after `| head`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _not_swept(words: Sequence[str], config: Any) -> str:
    """What is wrong with options that are given several values and make no sweep, or nothing."""
    if single := list(lists_in(words, RunOptions())):
        return f"`{single[0]}` must be one value: only options of what is computed can be swept"
    for field in dataclasses.fields(config):
        option = field.name.replace("_", "-")
        if {f"--{option}", f"--no-{option}"} <= set(words):
            return f"`{field.name}` must be given once; in Python, Config({field.name}=[False, True]) sweeps it"
    return ""


class _Chosen(NamedTuple):
    """A figure, its configuration, and where and how it is made."""

    figure: Figure
    config: Any
    run: RunOptions
    program: str
    words: Sequence[str]

    def __call__(self) -> int:
        return produce(self.figure, self.config, self.run, program=self.program, words=self.words)


def _command(figure: Figure, words: Sequence[str], program: str) -> Callable[..., _Chosen]:
    """A function whose signature is a figure's options, with the defaults of a rehearsal if it is one."""
    default = figure.Config().quick() if "--quick" in words else figure.Config()

    def choose(
        config: tyro.conf.OmitArgPrefixes[figure.Config] = default,  # pyright: ignore[reportInvalidTypeForm]
        run: tyro.conf.OmitArgPrefixes[RunOptions] = RunOptions(),  # noqa: B008
    ) -> _Chosen:
        return _Chosen(figure, config, run, program, words)

    choose.__doc__ = f"{figure.SHOWS} Several values of an option that takes one make a sweep of them."
    return choose


def _runs(out: Path = Path("results")) -> Callable[[], int]:
    """Lists runs: done, running, stopped or failed, with the command that goes on.

    Args:
        out: The folder that was `--out` of the runs.
    """

    def tell() -> int:
        if not out.exists():
            print(f"There are no runs yet: no folder {out}. `--out` names another one.")
            return 0
        try:
            entries = runs_in(out)
        except OSError as error:
            print(error, file=sys.stderr)
            return 1
        print(aligned(table_of(entries)) if entries else f"No run has a record in {out}.")
        return 0

    return tell


def _one_line(box: str) -> str:
    """The parser's framed message as a sentence."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", box).rstrip().splitlines()
    framed = bool(lines) and lines[0].startswith("\u256d")  # else, without Unicode, a title and a rule are above
    sections: list[list[str]] = [[]]
    for line in lines[1:-1] if framed else lines[2:]:
        words = line.strip("\u2502 ")
        if set(words) <= {"\u2500", "-"}:
            sections.append([])
        else:
            sections[-1].append(words)
    first, *others = (" ".join(section) for section in sections)
    sentence = re.sub(r"^Error parsing \S*__\S*: ", "", first)
    meant = next((re.search(r"--[\w-]+", other) for other in others if other.startswith("Perhaps")), None)
    if meant is None and others and others[0].startswith("Available"):
        sentence = f"{sentence}. {others[0]}"
    return f"{sentence} (perhaps {meant.group()}; --help lists all)" if meant else sentence


def produce(
    figure: Figure, config: Any, run: RunOptions, *, program: str = "dissociation", words: Sequence[str] = ()
) -> int:
    """Computes, draws, writes and reports one figure.

    Args:
        figure: Which.
        config: Its configuration.
        run: Where and how.
        program: The command's name, for messages.
        words: The words after it, for the report.

    Returns:
        The exit status: 0; 1 for data or files that cannot be read or written; 2 for settings that the data cannot
        meet; 130 after an interrupt and 143 after SIGTERM.
    """
    return _guarded(program, run, lambda: _run(figure, config, run, ("python", "-m", program, *words)))


def _guarded(program: str, run: RunOptions, work: Callable[[], Any]) -> int:
    """An exit status: that of the work, or of what it raised, which is told of in a sentence."""
    interrupts.begin()
    tell, stopped = partial(_tell, program), partial(_stopped, program)
    interrupts.advice = interrupts.NOTHING
    try:
        _join(run)
        work()
    except _Unfit as unfit:
        error = unfit.error
        return tell(error, 2 if isinstance(error, WrongValue) else 1, error)
    except KeyboardInterrupt as error:
        return stopped(error)
    except BrokenPipeError:  # `run_command` ends quietly
        raise
    except (OSError, WrongValue, RefusedFile, MemoryError) as error:
        nameless = isinstance(error, OSError) and error.errno is not None and error.filename is None
        return tell(f"{error} (while writing to {run.out})" if nameless else error, 1, error)
    except Exception as error:
        if interrupts.heard():  # on its way through a compiler an interrupt can become another exception
            return stopped(error)
        if "RESOURCE_EXHAUSTED" in str(error):
            return tell(f"out of memory; choose smaller sizes. {str(error).splitlines()[0]}", 1, error)
        raise
    return 0


class _Unfit(Exception):
    """An option that does not fit the data, or data that cannot be had."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


def _source(figure: Figure, config: Any) -> Any:
    try:
        return figure.source(config)
    except (OSError, ValueError) as error:
        raise _Unfit(error) from error


def _join(run: RunOptions) -> None:
    if run.distributed:
        where = run.coordinator_address, run.num_processes, run.process_id
        try:
            processes.initialize(*where, heartbeat=run.heartbeat)
        except (OSError, ValueError) as error:
            raise _Unfit(error) from error


def _tell(program: str, what: object, status: int, error: BaseException) -> int:
    if processes.leaving(error, status):
        print(f"{program}: {' '.join(str(what).split())}", file=sys.stderr)
    return status


def _stopped(program: str, error: BaseException) -> int:
    if processes.leaving(error, interrupts.status()):
        print(f"\n{program}: stopped. {interrupts.advice}", file=sys.stderr)
    return interrupts.status()


def _run(figure: Figure, config: Any, run: RunOptions, words: Sequence[str], name: str | None = None) -> Exhibit | None:
    """Makes a figure in a folder of this name; what it made, in the process that wrote it."""
    began, data = time.perf_counter(), _source(figure, config)
    key = jax.random.PRNGKey(run.seed)
    identity = artifacts.identity_of(config, key, data)
    folder = run.out / (run_name(figure, config, run, identity) if name is None else name)
    parts, made = folder / "parts", []
    with contextlib.ExitStack() as held:
        processes.on_main(lambda: _take_folder(figure, run, folder, identity, held))
        interrupts.advice = f"The same command goes on; finished parts are in {parts}."
        _record(held, folder, words, {"figure": figure.STEM, **identity, "seed": run.seed}, run)
        compiling = start_compilation_cache()
        progress = None if run.silent or not processes.is_main() else "terminal"
        results = figure.compute(config, key=key, dataset=data, folder=parts, progress=progress)
        seconds = time.perf_counter() - began
        processes.on_main(lambda: made.append(_finish(figure, config, run, folder, results, seconds, compiling, words)))
    return made[0] if made else None


def _record(
    held: contextlib.ExitStack, folder: Path, words: Sequence[str], facts: Mapping[str, Any], run: RunOptions
) -> None:
    """Begins the record and the log of a run, which end with `held`."""
    if processes.is_main():
        facts = {**facts, "environment": provenance.environment()}
        goes_on = [word for word in words if word != "--fresh"]
        held.enter_context(recorded(folder, goes_on, facts, None if run.silent else sys.stderr))


def _produce_all(chosen: Sequence[_Chosen], lists: Mapping[str, Any], program: str, words: Sequence[str]) -> int:
    """Makes the figure of every configuration, in a folder of the sweep, and one file of all their arrays."""
    figure, run = chosen[0].figure, chosen[0].run
    values = {name: list(dict.fromkeys(getattr(each.config, name) for each in chosen)) for name in lists}
    if twice := [name for name, own in lists.items() if len(values[name]) < len(own)]:
        print(f"{program}: `{twice[0]}` must be different values, got {', '.join(lists[twice[0]])}", file=sys.stderr)
        return 2
    grid = config_grid(figure.Config, values).grid
    command = ("python", "-m", program, *words)

    def work() -> None:
        for each in chosen:
            _source(figure, each.config)
        settings = {"configs": [each.config for each in chosen], "seed": run.seed, "axes": grid.axes}
        name = re.sub(r"[^\w.-]+", "-", f"{figure.STEM}_sweep_{'_'.join(grid.axes)}")[:_LONGEST_NAME]
        folder = run.out / f"{name}_{artifacts.digest_of(settings)[:10]}"
        with contextlib.ExitStack() as held:
            processes.on_main(lambda: _take_sweep(run, folder, held))
            shape = dict(zip(grid.axes, grid.shape, strict=True))
            _record(
                held, folder, command, {"figure": figure.STEM, "sweep": shape}, dataclasses.replace(run, silent=True)
            )
            held.enter_context(artifacts.sharing(folder / TRAINED))
            made = []
            for number, each in enumerate(chosen):
                if not run.silent and processes.is_main():
                    print(f"{number + 1} of {len(chosen)}: {names_of(grid)[number]}", file=sys.stderr)
                own = dataclasses.replace(run, out=folder)
                made.append(_run(figure, each.config, own, command, names_of(grid)[number]))
            processes.on_main(lambda: _finish_sweep(figure, grid, folder, made, run, command))

    return _guarded(program, run, work)


def _take_sweep(run: RunOptions, folder: Path, held: contextlib.ExitStack) -> None:
    held.enter_context(artifacts.locked(folder))
    if run.fresh:
        _set_aside(folder / TRAINED)


def _finish_sweep(
    figure: Figure, grid: Grid, folder: Path, made: Sequence[Any], run: RunOptions, words: Sequence[str]
) -> None:
    """One file of the arrays that have one shape in all configurations, with the grid's axes first, and one report."""
    own = [load_results((folder / name / figure.STEM).with_suffix(".npz")) for name in names_of(grid)]
    whole = stacked(own, grid)
    left = sorted({name for each in own for name in each.arrays} - set(whole.arrays))
    target = whole.save(folder / f"{figure.STEM}.npz")
    write_bytes(folder / "report.html", sweep_report_of(figure, grid, made, left, run.seed, words).encode())
    told = f"{target.name}, with {len(whole.arrays)} of {len(whole.arrays) + len(left)} arrays of all configurations"
    print(f"\nWrote {told}, and report.html, in {folder}", flush=True)
    if left:
        print(f"In the folders of configurations alone, as they have no common shape: {', '.join(left)}", flush=True)


def _set_aside(path: Path) -> None:
    """Gives what is there another name."""
    if path.exists():
        names = (path.with_name(f"{path.name}-before-{i}") for i in range(1, 10**6))
        path.rename(next(name for name in names if not name.exists()))


def _take_folder(figure: Figure, run: RunOptions, folder: Path, identity: Any, held: contextlib.ExitStack) -> None:
    parts = folder / "parts"
    if run.resume and not (parts / artifacts.IDENTITY).exists():
        raise RefusedFile(_nothing_to_resume(figure, run, folder, identity))
    held.enter_context(artifacts.locked(folder))
    if run.fresh:
        _set_aside(parts)
    elif parts.exists() and not run.silent:
        print(f"Going on in {folder} (--fresh begins anew).", file=sys.stderr)


def _finish(
    figure: Figure, config: Any, run: RunOptions, folder: Path, results: Any, seconds: float, compiling: Any, words: Any
) -> Exhibit:
    """Draws, writes and reports."""
    stem = folder / figure.STEM
    exhibit = exhibit_of(figure, results)
    written = [*plotting.save_figure(exhibit.figure, stem), stem.with_suffix(".npz")]
    labelled = flat_results_of(figure, results)
    save_npz(written[-1], labelled, families_of(figure, results))
    description = figure.describe(results) | {
        "seed": run.seed,
        "axes": labelled.dims,
        "seconds": results.seconds | {"this call": seconds, "compiling": compiling["seconds"]},
    }
    written.append(stem.with_suffix(".json"))
    artifacts.save_description(written[-1], description)
    written.append(folder / "report.html")
    write_bytes(written[-1], report_of(figure, exhibit, config, results, description, words).encode())
    print(f"\n{exhibit.text()}")
    compiled = f"{compiling['seconds']:.1f} s went into compiling {compiling['programs']} programs"
    kept = jax.config.values["jax_compilation_cache_dir"]
    print(f"\n{seconds:.0f} s; {compiled} ({compiling['cached']} more came from {kept}).")
    print(f"Wrote {', '.join(path.name for path in written)} in {folder}", flush=True)
    return exhibit


def run_name(figure: Figure, config: Any, run: RunOptions, identity: Mapping[str, Any]) -> str:
    """The name of a run's folder: figure, settings that are not the default, and a digest of all that defines it."""
    default = figure.Config().quick() if run.quick else figure.Config()
    words = [figure.STEM, *(["quick"] * run.quick)]
    if run.seed != DEFAULT_SEED:
        words.append(f"seed-{run.seed}")
    for field in dataclasses.fields(config):
        if (value := getattr(config, field.name)) != getattr(default, field.name):
            values = value if isinstance(value, tuple) else (value,)
            words.append("-".join([field.name, *(str(part) for part in values)]))
    name = re.sub(r"[^\w.-]+|_(?=_)", "-", "_".join(words))[:_LONGEST_NAME].rstrip("-_.")
    settings = {**identity, "figure": figure.STEM, "version": metadata.version("dissociation")}
    return f"{name}_{artifacts.digest_of(settings)[:10]}"


def _nothing_to_resume(figure: Figure, run: RunOptions, folder: Path, identity: Mapping[str, Any]) -> str:
    """Why `--resume` refuses, with the run that differs least."""
    others = []
    for path in sorted(run.out.glob(f"{figure.STEM}_*")):
        with contextlib.suppress(OSError, ValueError):
            others.append((artifacts.differences(artifacts.read_identity(path / "parts"), identity), path))
    near = ""
    if others:
        differ, path = min(others, key=lambda other: len(other[0]))
        near = f" The nearest is {path}, whose {checks.that_differ(differ or ['version'])}."
    return f"`resume` must find an earlier run of the same settings, got none in {folder}.{near}"


def cache_folder() -> Path:
    """Where compiled programs are kept from one run to the next."""
    return Path(platformdirs.user_cache_dir("dissociation")) / "xla"


def start_compilation_cache() -> dict[str, Any]:
    """Turns JAX's persistent cache on, unless it is, and returns a tally of compilations that keeps itself current."""
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
