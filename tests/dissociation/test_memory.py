"""What programs take, against what the process grows by; and limits of machine, control groups and process."""

import ctypes
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dissociation import memory
from dissociation.bmap import bmap

HIDDEN, WIDE = 64, 1024


def layers(scale, x, up, down):
    return jnp.sum(jax.nn.relu(jax.nn.relu(x * scale @ up) @ down))


def own_weights(scale, x, up, down):
    up = up * scale + 1
    return jnp.sum(jax.nn.relu(jax.nn.relu(x @ up) @ up.T))


def gradient(scale, x, up, down):
    return jnp.sum(jax.grad(lambda w: jnp.sum(jax.nn.relu(jax.nn.relu(x @ w * scale) @ down) ** 2))(up))


def in_a_loop(scale, x, up, down):
    return jax.lax.map(lambda factor: layers(scale * factor, x, up, down), jnp.arange(2.0))


def products(scale, x, up, down):
    return (x * scale) @ (up * scale)


def elementwise(scale, x, up, down):
    return jnp.sum(jax.lax.cumsum(jnp.tile(x, (1, 16)) * scale))


def status(name):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


def growth(call):
    """By how much the resident memory is larger at its peak during the call than before."""
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls freed would be taken again without growing
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = status("VmRSS")
    jax.block_until_ready(call())
    return status("VmHWM") - before


FUNCTIONS = {f.__name__: f for f in (layers, own_weights, gradient, in_a_loop, products, elementwise)}
MEMBERS, BUDGET = (96, 200), 100_000_000  # 300 members of `layers` all at once: 170 MB


def measure():
    """Of every program its account, what it takes, and the compiler's own count; of batches what they take."""
    x, up, down = (jnp.ones(shape) for shape in ((128, HIDDEN), (HIDDEN, WIDE), (WIDE, HIDDEN)))
    measured = {}
    for name, function in FUNCTIONS.items():
        for members in MEMBERS:
            arguments = jnp.linspace(0.5, 1.0, members), x, up, down
            program = jax.jit(jax.vmap(function, in_axes=(0, None, None, None))).lower(*arguments).compile()
            account, compilers = memory.program_bytes(program), program.memory_analysis().temp_size_in_bytes
            measured[f"{name}-{members}"] = account, growth(partial(program, *arguments)), compilers + 4 * members
    scales = jnp.linspace(0.5, 1.0, 300)
    mapped = bmap(lambda scale: layers(scale, x, up, down), batch_size="auto", memory_budget=BUDGET)
    jax.block_until_ready(mapped(scales))  # compiling takes memory, too
    whole = growth(lambda: jax.vmap(lambda scale: layers(scale, x, up, down))(scales))
    return measured | {"all at once": whole, "in batches": growth(lambda: mapped(scales))}


@pytest.fixture(scope="module")
def measured():
    """In a process of its own: this one holds memory that earlier tests freed, and takes it again without growing."""
    if jax.default_backend() != "cpu":
        pytest.skip("resident memory is the host's")
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs Linux's count of resident memory")
    done = subprocess.run([sys.executable, __file__], capture_output=True, check=True, text=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("members", MEMBERS)
def test_no_program_takes_more_than_its_account(function, members, measured):
    account, taken, compilers = measured[f"{function}-{members}"]
    assert taken <= account + 2**22  # the rest of the process, and the stacks of its threads, are not quite still
    assert account <= 5 * taken + 4 * memory.PACKING
    if function == "layers":  # the compiler alone counts the sums
        assert compilers < taken / 10


def test_batches_of_dense_layers_keep_within_the_budget(measured):
    assert measured["in batches"] < BUDGET < measured["all at once"]


PROGRAM = """HloModule jit_f, is_scheduled=true

%fused_computation (param_0: f32[4], param_1: f32[10,20], param_2: f32[20,10]) -> f32[4] {
  %param_0 = f32[4]{0} parameter(0)
  %param_1 = f32[10,20]{1,0} parameter(1)
  %wide = f32[40,10]{1,0} broadcast(%param_0), dimensions={0}
  %dot.1 = f32[40,20]{1,0} dot(%wide, %param_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %twice = f32[40,20]{1,0} exponential(%dot.1)
  %once = f32[40,20]{1,0} negate(%twice)
  %sum = f32[40,20]{1,0} add(%twice, %once)
  %param_2 = f32[20,10]{1,0} parameter(2)
  ROOT %dot.2 = f32[40,10]{1,0} dot(%sum, %param_2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[4], b: f32[10,20], c: f32[20,10]) -> f32[40,10] {
  %a = f32[4]{0} parameter(0)
  ROOT %ynn_fusion = f32[40,10]{1,0} fusion(%a, %b, %c), kind=kCustom, calls=%fused_computation, backend_config={}
}
"""


def test_scratch_of_a_program_counted_by_hand():
    product, twice = 40 * 20 * 4, 40 * 20 * 4  # the last product is the result, which the compiler counts
    copied = 4 * (40 * 10 + 10 * 20) + 4 * (40 * 20 + 20 * 10)
    reordered = 4 * (10 * 20 + 20 * 10)
    assert memory.library_scratch(PROGRAM) == product + twice + copied + reordered
    # Fused by the compiler itself, nothing lies in between but what the routines copy.
    assert memory.library_scratch(PROGRAM.replace("kCustom", "kLoop")) == copied
    halves = PROGRAM.replace("f32", "bf16")
    assert memory.library_scratch(halves) == (product + twice + copied + reordered) // 2


def test_bytes_of_shapes():
    shapes = {"f32[4,3]{1,0}": 48, "pred[7]": 7, "(f64[2]{0}, s32[])": 20, "c64[3]": 24, "bf16[5]": 10, "s4[6]": 6}
    assert {shape: memory._bytes_of(shape) for shape in shapes} == shapes


def group(folder, limit, used, stat, names):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{stat}\n")


V2, V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


@pytest.mark.parametrize(("names", "top", "line"), [(V2, "", "0::/a/b"), (V1, "memory", "4:cpu,memory:/a/b")])
def test_control_groups_and_their_parents_limit(tmp_path, names, top, line):
    process, root = tmp_path / "cgroup", tmp_path / "fs"
    process.write_text(f"9:name=systemd:/x\n{line}\n")
    group(root / top / "a/b", 1000, 400, "inactive_file 50", names)
    group(root / top / "a", 2000, 1900, "inactive_file 0", names)
    group(root / top, "max" if names is V2 else 2**63 - 4096, 3000, "inactive_file 0", names)
    assert sorted(memory._free_in_groups(process, root)) == [100, 650]
    # In a container the path of the host does not exist; the limit stands at the top.
    process.write_text(f"{line.removesuffix('/a/b')}/far/away\n")
    group(root / top, 5000, 3000, "inactive_file 10\ntotal_inactive_file 20", names)
    assert list(memory._free_in_groups(process, root)) == [2020]


def test_nothing_is_read_where_nothing_is(tmp_path):
    assert list(memory._free_in_groups(tmp_path / "none", tmp_path)) == []
    assert memory._table(str(tmp_path / "none")) == {}
    assert 2**20 < memory._free_pages() < 2**50
    assert 2**20 < memory.free_on_host() < 2**50


LIMITED = """
import resource
from dissociation import memory
free = memory.free_on_host()
for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
    used = memory._table("/proc/self/status")[name]
    resource.setrlimit(limit, (used + 300_000_000, resource.getrlimit(limit)[1]))
    print(memory.free_on_host() - 300_000_000)
    resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_limits_of_the_process_count():
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, check=True, text=True)
    for left in done.stdout.split():
        assert abs(int(left)) < 20_000_000  # what reading them took


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure()))
