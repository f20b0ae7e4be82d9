"""What became of runs: a record and a log in each run's folder, and a list of them."""

import json
import logging
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from dissociation import files
from dissociation.files import write_bytes

RECORD, LOG = "run.json", "log.txt"
_TIME = "%Y-%m-%d %H:%M:%S"


@contextmanager
def recorded(
    folder: str | os.PathLike[str], command: Sequence[str], facts: Mapping[str, Any], plans: Any = None
) -> Iterator[None]:
    """Keeps a record of what is done inside, and the packages' log, in a folder that one process holds.

    Args:
        folder: Which.
        command: The words that begin it, and go on with it.
        facts: What else the record says: the environment, settings, a grid. Plain JSON.
        plans: A text stream on which the plans of trainings are shown as well.
    """
    record: dict[str, Any] = {"status": "running", "command": shlex.join(command), "began": _now(), **facts}
    began = time.perf_counter()

    def write(status: str, **more: Any) -> None:
        record.update(status=status, seconds=round(time.perf_counter() - began, 1), **more)
        write_bytes(Path(folder) / RECORD, (json.dumps(record, indent=2, default=str) + "\n").encode())

    write("running")
    handler = logging.FileHandler(Path(folder) / LOG)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    handler.handleError = lambda record: None  # a log is no reason to say more of a full disk
    handlers: list[logging.Handler] = [handler]
    if plans is not None:
        handlers.append(logging.StreamHandler(plans))
        handlers[-1].addFilter(lambda record: record.getMessage().startswith("plan: "))
    loggers = [logging.getLogger(name) for name in ("dissociation", "koopman", "py.warnings")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        for each in handlers:
            logger.addHandler(each)
    loggers[0].info("began: %s", record["command"])
    try:
        yield
    except BaseException as error:
        status = "stopped" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"
        loggers[0].info("%s: %s: %s", status, type(error).__name__, error)
        with suppress(OSError):  # what went wrong may be the disk
            write(status, ended=_now(), error=f"{type(error).__name__}: {error}"[:500])
        raise
    else:
        loggers[0].info("done")
        write("done", ended=_now())
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
            for each in handlers:
                logger.removeHandler(each)
        handler.close()


def _now() -> str:
    return time.strftime(_TIME)


class Entry(NamedTuple):
    """A run in a list.

    Attributes:
        folder: Its folder.
        status: "done", "running", "stopped" (killed or interrupted: its command goes on) or "failed".
        began: When it, or its latest part, did.
        seconds: How long that took, as far as it is known.
        command: Which began it, and goes on with it.
        error: Why it failed, or stopped; or nothing.
    """

    folder: Path
    status: str
    began: str
    seconds: float
    command: str
    error: str


def runs_in(out: str | os.PathLike[str]) -> list[Entry]:
    """The runs below a folder, the latest last; those of a sweep lie in its own folder.

    Raises:
        FileNotFoundError: If there is no such folder.
    """
    if not Path(out).is_dir():
        raise FileNotFoundError(f"`out` must be a folder with runs, got {out}, which is none.")
    entries = []
    for path in Path(out).rglob(RECORD):
        try:
            record = json.loads(path.read_text())
            entry = Entry(
                path.parent,
                record["status"],
                record["began"],
                float(record["seconds"]),
                record["command"],
                record.get("error", ""),
            )
        except (OSError, ValueError, KeyError, TypeError):
            entry = Entry(path.parent, "broken", "", 0.0, "", f"{path} cannot be read")
        if entry.status == "running" and not files.is_locked(path.parent / ".lock"):
            entry = entry._replace(status="stopped", error="its process is gone", seconds=_heard(path.parent, entry))
        entries.append(entry)
    return sorted(entries, key=lambda entry: entry.began)


def _heard(folder: Path, entry: Entry) -> float:
    """How long a run that was killed had been seen to run: until it last wrote a file into its folder."""
    with suppress(OSError, ValueError):
        began = time.mktime(time.strptime(entry.began, _TIME))
        written = max(path.stat().st_mtime for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
        return max(written - began, entry.seconds)
    return entry.seconds


def table_of(entries: Sequence[Entry]) -> list[list[str]]:
    """A header, and a row for each run."""
    rows, commands = [["status", "began", "seconds", "folder", "command"]], set()
    for entry in sorted(entries, key=lambda entry: entry.folder):
        command = "as above" if entry.command in commands else entry.command
        commands.add(entry.command)
        rows.append([entry.status, entry.began, f"{entry.seconds:.0f}", str(entry.folder), command])
        if entry.status in ("failed", "broken"):
            rows.append(["", "", "", entry.error, ""])
    return rows
