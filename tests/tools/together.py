"""Start processes on this machine that work together, and wait for them; the program of each process.

    python tests/tools/together.py fit 127.0.0.1:1234 2 0 members=5 checkpoint=run.ckpt then member_map=vmap

trains small networks twice, as process 0 of 2, and prints a digest of each outcome.
"""

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(count: int, *words: str, command: list[str] | None = None, devices: int = 1) -> list[subprocess.Popen[str]]:
    """Start `count` processes of a program of this file or of a figure's command, each with `devices` devices."""
    where = f"127.0.0.1:{free_port()}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONUNBUFFERED": "1"}
    env["XLA_FLAGS"] = " ".join(w for w in env.get("XLA_FLAGS", "").split() if "device_count" not in w)
    started = []
    for index in range(count):
        line = [sys.executable, __file__, words[0], where, str(count), str(index), *words[1:]]
        if command is not None:
            joined = ["--coordinator-address", where, "--num-processes", str(count), "--process-id", str(index)]
            joined = ["--distributed", *joined] if count > 1 else []
            line = [sys.executable, *command, *joined]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(line, env=env, **pipes))
    return started


def wait(started: list[subprocess.Popen[str]], timeout: float = 200) -> list[tuple[int, str, str]]:
    """Return exit status, output and error output of each process, and kill those that are left."""
    deadline = time.monotonic() + timeout
    try:
        return [
            (process.returncode, printed, complained)
            for process in started
            for printed, complained in [process.communicate(timeout=max(1, deadline - time.monotonic()))]
        ]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()


def run(count: int, *words: str, **options) -> list[str]:
    """Return the output of each of `count` processes; raise unless all succeed."""
    ended = wait(start(count, *words, **options))
    assert all(status == 0 for status, *_ in ended), "\n".join(f"{status}: {err}" for status, _, err in ended)
    return [said for _, said, _ in ended]


def end(options: dict[str, str], step: int) -> None:
    """End a run by an error or a signal, if the options do so at this step."""
    if options.get("fail") == str(step):
        raise OSError("the disk of the callback is full")
    for name, number in (("interrupt", signal.SIGINT), ("terminate", signal.SIGTERM)):
        if options.get(name) == str(step):
            os.kill(os.getpid(), number)


def fit(options: dict[str, str]) -> None:
    """Train small networks, write the history and weights to `save`, and print a digest of the outcome."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import dissociation
    from dissociation.training import Epochs, Save, make_step
    from dissociation.training import _checkpoint as checkpoint
    from dissociation.training import fit as train

    key, members = jax.random.key(3), int(options.get("members", 5))
    x = jax.random.normal(key, (60, 4))
    models = eqx.filter_vmap(lambda key: eqx.nn.MLP(4, 1, 8, 1, key=key))(jax.random.split(key, members))

    def loss(model, batch, key):
        noise = 0.1 * jax.random.normal(key, batch.shape[:1])
        return jnp.mean((jax.vmap(model)(batch)[:, 0] - jnp.sin(batch[:, 0]) - noise) ** 2)

    def observe(model, step, key):
        return {"norm": jnp.linalg.norm(model.layers[0].weight), "drawn": jax.random.normal(key)}

    def look(step, records):
        print(f"record {step} of {records['loss'].shape[0]} members in process {jax.process_index()}")
        end(options, step)
        return jnp.arange(members) == 1 if options.get("freeze") == str(step) else None

    def save(path, tree, header):
        if options["die"] == f"{jax.process_index()}:{header['step']}":
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, tree, header)

    if "die" in options:
        write, checkpoint.save = checkpoint.save, save
    mesh = dissociation.member_mesh(data=int(options["data"])) if "data" in options else "auto"
    result = train(
        models,
        make_step(loss, optax.adam(1e-2)),
        Epochs(x, 12, shared="own" not in options),
        num_steps=int(options.get("steps", 40)),
        key=jax.random.split(key, members) if "own" in options else key,
        save=Save(observe, seconds=0),
        member_map=options.get("member_map", "auto"),
        mesh=mesh,
        callbacks=[look],
        checkpoint=options.get("checkpoint"),
    )
    print(f"digest {checkpoint.fingerprint((result.state, result.history[:4], result.diverged_at))}")
    if "save" in options and jax.process_index() == 0:
        leaves = enumerate(jax.tree.leaves(eqx.filter(result.models, eqx.is_array)))
        np.savez(options["save"], loss=result.history.loss, **{f"leaf_{i}": leaf for i, leaf in leaves})


def maps(options: dict[str, str]) -> None:
    """Map over the members of this process, all-gather, call functions in process 0 alone, and make `fit` raise."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import pytest

    import dissociation
    from dissociation import bmap
    from dissociation.training import _distributed as distributed
    from dissociation.training import _members as members
    from dissociation.training._partition import Partition

    number = 5
    x = {"a": jnp.arange(3.0 * number).reshape(number, 3), "key": jax.random.split(jax.random.key(1), number), "n": 2}
    local = Partition.over_processes(number)

    def function(own):
        return bmap(lambda one: {"sum": one["a"].sum() * one["n"], "drawn": jax.random.normal(one["key"])})(own)

    whole, found = function(x), local.gather(function(local.take(x)))
    for name, leaf in whole.items():
        np.testing.assert_allclose(leaf, found[name], rtol=1e-6)
    again = local.gather(local.take(x))
    np.testing.assert_array_equal(again["a"], x["a"])
    assert bool(jnp.all(again["key"] == x["key"]))
    wide = local.gather(local.take(np.arange(number, dtype=np.int64) + 2**40))
    np.testing.assert_array_equal(wide, np.arange(number) + 2**40)
    index = jax.process_index()
    large = distributed.all_gather(bytes([index]) * (index * 2**24 + 3))
    assert large == [bytes([i]) * (i * 2**24 + 3) for i in range(jax.process_count())]
    assert distributed.on_main(lambda: {"process": jax.process_index()}) == {"process": 0}
    with pytest.raises(ConnectionError if index else KeyError, match="no such key"):
        distributed.on_main(lambda: {}["no such key"])
    mesh = dissociation.member_mesh()
    assert mesh.size == jax.local_device_count()
    of_all = jax.make_mesh((jax.device_count(),), ("members",))
    with pytest.raises(ValueError, match="`mesh` must hold devices of this process, got devices of several"):
        members.check_mesh(of_all)
    with pytest.raises(ValueError, match="`fit` must be called with the same models, hyperparameters, key and steps"):
        fit({"members": str(4 + index)})
    with pytest.raises((ValueError, ConnectionError), match=r"by as many processes as wrote it \(1\), got 2\."):
        fit(options)
    print(f"{len(local.take(x)['a'])} of {number}; devices {mesh.size}")


def main() -> None:
    """Run the program of one process: "maps", or "fit" several times, with "then" between the options."""
    part, where, count, index, *words = sys.argv[1:]
    from dissociation import training

    if int(count) > 1:
        training.initialize(where, int(count), int(index))
    for _, own in itertools.groupby(words, "then".__eq__):
        if (given := list(own)) != ["then"]:
            {"fit": fit, "maps": maps}[part](dict(word.split("=", 1) for word in given))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
