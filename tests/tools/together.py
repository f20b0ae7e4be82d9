"""Processes on this machine that work together: `start` and `wait` for tests, and what each of them runs.

    python tests/tools/together.py fit 127.0.0.1:1234 2 0 members=5 steps=40 checkpoint=run.ckpt

trains small networks, as process 0 of 2, and prints a digest of all that came of it. A count of 1 joins nothing.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(count: int, *words: str, command: list[str] | None = None, devices: int = 1) -> list[subprocess.Popen[str]]:
    """Starts `count` processes of a part of this file, or of a figure's command, each with so many devices."""
    where = f"127.0.0.1:{free_port()}"
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "PYTHONUNBUFFERED": "1"}
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
    """Exit status, what was printed, and what was complained of, of each; kills what is left in the end."""
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
    """What each of `count` processes prints, which must end well."""
    ended = wait(start(count, *words, **options))
    assert all(status == 0 for status, *_ in ended), "\n".join(f"{status}: {err}" for status, _, err in ended)
    return [said for _, said, _ in ended]


def fit(options: dict[str, str]) -> None:
    """Trains small networks, members in turn unless `member_map` says otherwise, and prints a digest of the outcome."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import dissociation
    from dissociation.training import Epochs, Layout, Save, make_step
    from dissociation.training import _checkpoint as checkpoint
    from dissociation.training import fit as train

    key, members = jax.random.key(3), int(options.get("members", 5))
    x = jax.random.normal(key, (60, 4))
    models = eqx.filter_vmap(lambda key: eqx.nn.MLP(4, 1, 8, 1, key=key))(jax.random.split(key, members))
    slow, die = float(options.get("slow", 0)), options.get("die", "").split(":")

    def loss(model, batch, key):
        noise = 0.1 * jax.random.normal(key, batch.shape[:1])
        return jnp.mean((jax.vmap(model)(batch)[:, 0] - jnp.sin(batch[:, 0]) - noise) ** 2)

    def observe(model, step, key):
        return {"norm": jnp.linalg.norm(model.layers[0].weight), "drawn": jax.random.normal(key)}

    def look(step, records):
        said = f"{step} of {records['loss'].shape[0]} members"
        sys.stdout.write(f"record {said} in process {jax.process_index()}\n")
        time.sleep(slow)
        if options.get("fail") == str(step):
            raise OSError("the disk of the callback is full")
        if options.get("interrupt") == f"{step}":
            os.kill(os.getpid(), signal.SIGINT)
        if options.get("terminate") == f"{step}":
            os.kill(os.getpid(), signal.SIGTERM)
        return jnp.arange(members) == 1 if options.get("freeze") == str(step) else None

    def save(path, tree, header):
        if die == [str(jax.process_index()), str(header["step"])]:
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, tree, header)

    write, checkpoint.save = checkpoint.save, save
    mesh = dissociation.member_mesh(data=int(options.get("data", 1))) if "mesh" in options else "auto"
    result = train(
        models,
        make_step(loss, optax.adam(1e-2)),
        Epochs(x, 12, shared="own" not in options),
        num_steps=int(options.get("steps", 40)),
        key=jax.random.split(key, members) if "own" in options else key,
        save=Save(observe, seconds=0),
        layout=Layout(options.get("member_map", "auto"), mesh=mesh),
        callbacks=[look],
        checkpoint=options.get("checkpoint"),
    )
    print(f"digest {checkpoint.fingerprint((result.state, result.history[:4], result.diverged_at))}")
    if "save" in options and jax.process_index() == 0:
        leaves = enumerate(jax.tree.leaves(eqx.filter(result.models, eqx.is_array)))
        np.savez(options["save"], loss=result.history.loss, **{f"leaf_{i}": leaf for i, leaf in leaves})


def maps(options: dict[str, str]) -> None:
    """Map over the members of this process, all-gather, and call functions in process 0 alone."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import pytest

    import dissociation
    from dissociation import bmap
    from dissociation.training import _distributed as distributed
    from dissociation.training import _sharding as sharding

    number = int(options.get("members", 5))
    x = {"a": jnp.arange(3.0 * number).reshape(number, 3), "key": jax.random.split(jax.random.key(1), number), "n": 2}
    local = distributed.LocalMembers(number)

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
        sharding.check_mesh(of_all)
    print(f"{len(local.take(x)['a'])} of {number}; devices {mesh.size}")


def other(options: dict[str, str]) -> None:
    """Call `fit` with other arguments in each process."""
    import jax

    fit({"members": str(4 + jax.process_index())})


def main() -> None:
    """What one of the processes runs."""
    part, where, count, index, *words = sys.argv[1:]
    from dissociation import training

    if int(count) > 1:
        training.initialize(where, int(count), int(index))
    {"fit": fit, "maps": maps, "other": other}[part](dict(word.split("=", 1) for word in words))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
