"""Processes on this machine that work together: `start` and `wait` for tests, and what each of them runs.

    python tests/tools/together.py fit 127.0.0.1:1234 2 0 members=5 steps=40 checkpoint=run.ckpt

trains small networks, as process 0 of 2, and prints a digest of all that came of it. A count of 1 joins nothing.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HEARTBEAT = 5


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
    """Exit status, what was printed, and what was complained of, of each; kills what is left in the end.

    That one had to wait for the others, as on a busy machine, is no complaint.
    """
    deadline = time.monotonic() + timeout
    try:
        return [
            (process.returncode, printed, re.sub(r"(?m)^This process waits .*\n", "", complained))
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

    from dissociation import checkpoint, distributed, sharding
    from dissociation.training import Epochs, Layout, Save, make_step
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
        sys.stdout.write(f"record {said} in process {distributed.index()}\n")
        time.sleep(slow)
        if options.get("fail") == str(step):
            raise OSError("the disk of the callback is full")
        if options.get("interrupt") == f"{step}":
            os.kill(os.getpid(), signal.SIGINT)
        return jnp.arange(members) == 1 if options.get("freeze") == str(step) else None

    class Sampler(Epochs):
        def segment(self, step):
            if die == [str(distributed.index()), str(step)]:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().segment(step)

    mesh = sharding.member_mesh(data=int(options.get("data", 1))) if "mesh" in options else "auto"
    result = train(
        models,
        make_step(loss, optax.adam(1e-2)),
        Sampler(x, 12, shared="own" not in options),
        num_steps=int(options.get("steps", 40)),
        key=jax.random.split(key, members) if "own" in options else key,
        save=Save(observe, seconds=0),
        layout=Layout(options.get("member_map", "auto"), mesh=mesh),
        callbacks=[look],
        checkpoint=options.get("checkpoint"),
    )
    print(f"digest {checkpoint.fingerprint((result.state, result.history[:4], result.diverged_at))}")
    if "save" in options and distributed.is_main():
        leaves = enumerate(jax.tree.leaves(eqx.filter(result.models, eqx.is_array)))
        np.savez(options["save"], loss=result.history.loss, **{f"leaf_{i}": leaf for i, leaf in leaves})


def maps(options: dict[str, str]) -> None:
    """`over_processes`, `on_main`, global arrays and `map_members` on a mesh of all processes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import pytest

    from dissociation import distributed, sharding, shares
    from dissociation.bmap import bmap
    from dissociation.members import map_members

    number = int(options.get("members", 5))
    x = {"a": jnp.arange(3.0 * number).reshape(number, 3), "key": jax.random.split(jax.random.key(1), number), "n": 2}
    seen = []

    def function(own):
        seen.append(len(own["a"]))
        return bmap(lambda one: {"sum": one["a"].sum() * one["n"], "drawn": jax.random.normal(one["key"])})(own)

    whole, found = function(x), shares.over_processes(function, x)
    for name, leaf in whole.items():
        np.testing.assert_array_equal(leaf, found[name])
    large = distributed.exchange(np.full((distributed.index() + 2, 300_000), distributed.index()), "large")
    assert [leaf.shape[0] for leaf in large] == [i + 2 for i in range(distributed.number())]
    assert all((leaf == i).all() for i, leaf in enumerate(large))
    mesh = sharding.member_mesh()
    placed = sharding.place_members(sharding.pad_members({"a": x["a"], "key": x["key"]}, mesh.size), mesh)
    two = sharding.replicate(jnp.asarray(2.0), mesh)
    on_all = jax.jit(
        lambda two, placed: map_members(
            lambda two, one: two * one["a"].sum() + jax.random.normal(one["key"]),
            two,
            placed,
            member_map="vmap",
            mesh=mesh,
        )
    )(two, placed)
    wanted = np.asarray(whole["sum"] + whole["drawn"])
    for shard in on_all.addressable_shards:
        own = np.arange(len(on_all))[shard.index].clip(max=number - 1)
        np.testing.assert_allclose(shard.data, wanted[own], rtol=1e-6)
    with pytest.raises(KeyError) as raised:
        distributed.on_main(lambda: {}["no such key"])
    assert distributed.is_everywhere(raised.value)
    assert distributed.on_main(distributed.number) == 1
    print(f"{seen[1]} of {number}; devices {mesh.size}; from {distributed.on_main(distributed.index)}")


def mix(options: dict[str, str]) -> None:
    """Processes that do not run the same program."""
    import jax.numpy as jnp

    from dissociation import distributed, shares

    try:
        if options["what"] == "exchange":
            distributed.exchange(0, f"place {distributed.index()}")
        else:
            fit({"members": str(4 + distributed.index())})
    except (RuntimeError, ValueError) as error:
        print(error)
    print(shares.over_processes(lambda own: 2 * own, jnp.arange(3)).tolist())


def lose(options: dict[str, str]) -> None:
    """One process dies while what is exchanged goes from device to device."""
    import numpy as np

    from dissociation import distributed

    large, through = np.zeros(2**21, np.uint8), distributed._through_devices
    distributed.exchange(large)
    if distributed.index() == int(options["dead"]):
        distributed._through_devices = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    else:
        distributed._through_devices = lambda *given: (time.sleep(0.5), through(*given))[1]
    distributed.exchange(large)


def main() -> None:
    """What one of the processes runs."""
    part, where, count, index, *words = sys.argv[1:]
    from dissociation import distributed

    if int(count) > 1:
        distributed.initialize(where, int(count), int(index), heartbeat=HEARTBEAT)
    {"fit": fit, "maps": maps, "mix": mix, "lose": lose}[part](dict(word.split("=", 1) for word in words))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
