"""The small host-side modules: schedules, progress, sharding, plotting, argument checks."""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest

from dissociation import checks, plotting, sharding
from dissociation.member_map import map_members
from dissociation.progress import open_meter
from dissociation.schedule import log_spaced_steps, steps_per_epoch


def test_steps_per_epoch():
    assert steps_per_epoch(60_000, 128) == 469
    assert steps_per_epoch(60_000, 2048, drop_remainder=True) == 29
    assert steps_per_epoch(7, None) == 1
    with pytest.raises(ValueError, match=r"at most the number of samples \(7\), got 8"):
        steps_per_epoch(7, 8)


def test_log_spaced_steps():
    steps = log_spaced_steps(100_000, 30)
    assert steps[0] == 0
    assert steps[1] == 1
    assert steps[-1] == 100_000
    late = steps[-10:]
    np.testing.assert_allclose(late[1:] / late[:-1], 10 ** (5 / 28), rtol=1e-3)


def test_terminal_meter_shows_text_and_total(capsys):
    meter = open_meter("terminal", 20, "training")
    meter.advance(0, "")
    meter.advance(20, "loss 0.5")
    meter.close()
    shown = capsys.readouterr().err
    assert "20/20" in shown
    assert "loss 0.5" in shown


def test_own_meter_is_called():
    calls = []

    class Mine:
        def __init__(self, total, description):
            calls.append((total, description))

        def advance(self, step, text):
            calls.append((step, text))

        def close(self):
            calls.append("closed")

    meter = open_meter(Mine, 3, "x")
    meter.advance(1, "t")
    meter.close()
    assert calls == [(3, "x"), (1, "t"), "closed"]


@pytest.mark.parametrize("num_members", [1, 4, 5])
def test_members_are_split_over_devices_and_padding_is_dropped(num_members):
    mesh = sharding.member_mesh(jax.devices("cpu")[:4])
    tree = {"x": jnp.arange(3.0 * num_members).reshape(num_members, 3), "name": "kept"}
    placed = sharding.place_members(sharding.pad_members(tree, mesh.size), mesh)
    assert len({shard.device for shard in placed["x"].addressable_shards}) == 4
    assert {shard.data.shape[0] for shard in placed["x"].addressable_shards} == {-(-num_members // 4)}
    np.testing.assert_array_equal(sharding.drop_padding(placed, num_members)["x"], tree["x"])
    assert placed["name"] == "kept"
    with pytest.raises(ValueError, match="`mesh` must have the one axis 'members'"):
        sharding.check_mesh(jax.make_mesh((1,), ("batch",)))


@pytest.mark.parametrize("member_map", ["vmap", "scan", "unroll"])
@pytest.mark.parametrize("devices", [0, 2])
def test_map_members_equals_a_loop(member_map, devices):
    shared = (jnp.arange(3.0), "static")
    stacked = {"x": jnp.arange(12.0).reshape(4, 3), "f": jnp.sin}
    mesh = sharding.member_mesh(jax.devices("cpu")[:devices]) if devices else None

    def function(shared, member):
        return {"out": member["f"](shared[0] @ member["x"]), "sum": member["x"].sum()}

    mapped = map_members(function, shared, stacked, member_map=member_map, mesh=mesh)
    for m in range(4):
        alone = function(shared, {"x": stacked["x"][m], "f": jnp.sin})
        jax.tree.map(lambda a, b, m=m: np.testing.assert_allclose(a[m], b, rtol=1e-6), mapped, alone)


def test_band_is_mean_and_population_deviation():
    curves = np.array([[1.0, 2.0], [3.0, 6.0]])
    _, axes = plt.subplots()
    plotting.band(axes, np.array([0.0, 1.0]), curves, label="a")
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [2, 4])
    edges = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert {1.0, 3.0, 2.0, 6.0} <= set(edges.tolist())
    assert axes.collections[0].get_alpha() == 0.2
    plt.close()


def test_style_is_found_and_leaves_no_trace():
    before = plt.rcParams["axes.spines.top"]
    with plotting.house_style():
        assert not plt.rcParams["axes.spines.top"]
        assert "color" in plt.rcParams["axes.prop_cycle"].by_key()
    assert plt.rcParams["axes.spines.top"] == before


def test_checks_speak_one_language():
    with pytest.raises(ValueError, match="`x` must be positive and finite, got -1"):
        checks.check_positive("x", -1)
    with pytest.raises(ValueError, match="`x` must be positive and finite"):
        checks.check_positive("x", float("nan"))
    with pytest.raises(ValueError, match=r"`x` must be finite, got nan at index \(1, 0\)"):
        checks.check_finite("x", np.array([[1.0], [np.nan]]))
    with pytest.raises(TypeError, match=r"`n` must be a Python integer \(it sets a shape\), got True"):
        checks.check_count("n", True)
    jax.jit(lambda x: checks.check_positive("x", x))(-1.0)  # traced: passes
