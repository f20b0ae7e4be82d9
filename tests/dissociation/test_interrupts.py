import signal
import subprocess
import sys
import time

import pytest

INTERRUPTED = """
import sys, time
from dissociation.training import _interrupts as interrupts
interrupts.listen("the program")
interrupts.grace = 0.5
kind = sys.argv[1]
if kind == "saving":
    interrupts.begin()
    interrupts.advice = "Saved; the same command goes on."
print("ready", flush=True)
if kind == "deaf":
    interrupts.begin()
    try:
        time.sleep(30)
    except KeyboardInterrupt:
        time.sleep(30)
if kind == "threads":
    import atexit, os
    interrupts.begin()
    atexit.register(os.abort)
try:
    time.sleep(30)
except KeyboardInterrupt:
    print("saved")
    if kind == "threads":
        interrupts.end()
    sys.exit(interrupts.status())
"""


@pytest.mark.parametrize(
    ("kind", "said", "number"),
    [
        ("importing", "", signal.SIGINT),
        ("saving", "saved", signal.SIGINT),
        ("saving", "saved", signal.SIGTERM),
        ("threads", "saved", signal.SIGTERM),
        ("deaf", "", signal.SIGINT),
    ],
)
def test_signals_end_a_program_at_any_moment(kind, said, number):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED, kind], **options) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        began = time.perf_counter()
        process.send_signal(number)
        out, error = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert out.strip() == said
    assert "Traceback" not in error
    assert time.perf_counter() - began < 5
    # A program that ends by itself says so itself.
    assert ("the program: stopped. Nothing had started." in error) == (kind not in ("saving", "threads"))
