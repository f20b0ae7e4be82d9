"""Record and log in the folder of a run."""

import json
import logging
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dissociation._core.files import write_bytes

RECORD, LOG = "run.json", "log.txt"


@contextmanager
def recorded(folder: str | os.PathLike[str], command: Sequence[str], facts: Mapping[str, Any]) -> Iterator[None]:
    """Write the record of a run and the log of both packages to its folder while the block runs."""
    record: dict[str, Any] = {"status": "running", "command": shlex.join(command), "began": _now(), **facts}
    began = time.perf_counter()

    def write(status: str, **more: Any) -> None:
        record.update(status=status, seconds=round(time.perf_counter() - began, 1), **more)
        write_bytes(Path(folder) / RECORD, (json.dumps(record, indent=2, default=str) + "\n").encode())

    write("running")
    handler = logging.FileHandler(Path(folder) / LOG)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    handler.handleError = lambda record: None  # a full disk is reported by the run itself
    loggers = [logging.getLogger(name) for name in ("dissociation", "koopman", "py.warnings")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    loggers[0].info("began: %s", record["command"])
    try:
        yield
    except BaseException as error:
        status = "stopped" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"
        loggers[0].info("%s: %s: %s", status, type(error).__name__, error)
        with suppress(OSError):  # the disk may be the cause
            write(status, ended=_now(), error=f"{type(error).__name__}: {error}"[:500])
        raise
    else:
        loggers[0].info("done")
        write("done", ended=_now())
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
            logger.removeHandler(handler)
        handler.close()


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
