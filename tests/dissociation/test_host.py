"""The small host-side modules: schedules, progress, sharding, plotting, argument checks."""

import io
import sys
import time
from types import SimpleNamespace

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy import stats

import dissociation
from dissociation._core import checks
from dissociation.plotting import (
    band,
    differences,
    drawn_as,
    heat,
    house_style,
    letter,
    look,
    summarise,
)
from dissociation.training import _progress as progress_module
from dissociation.training import log_spaced_steps
from dissociation.training._progress import BarMeter, open_meter


def test_log_spaced_steps():
    steps = log_spaced_steps(100_000, 30)
    assert steps[0] == 0
    assert steps[1] == 1
    assert steps[-1] == 100_000
    late = steps[-10:]
    np.testing.assert_allclose(late[1:] / late[:-1], 10 ** (5 / 28), rtol=1e-3)


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_one_bar_that_moves(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    meter = open_meter("auto", 20, "training")
    for step in (0, 10, 20):
        meter.advance(step, f"loss {step}")
    meter.close()
    shown = screen.getvalue()
    assert "\n" not in shown.strip()
    assert all(f"{step}/20" in shown and f"loss {step}" in shown for step in (0, 10, 20))


def test_a_file_has_a_line_now_and_then(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(
        progress_module, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    )
    meter = open_meter("terminal", 20, "training")
    for step in range(20):
        meter.advance(step, f"loss {step}")
        now[0] += BarMeter.SECONDS / 4.5
    shown = capsys.readouterr().err
    assert [line.split("loss ")[1] for line in shown.splitlines()] == [
        f"{step}]" for step in (0, 5, 10, 15)
    ]
    assert "\r" not in shown
    meter.advance(20, "loss 20")
    meter.close()
    (last,) = capsys.readouterr().err.splitlines()
    assert "20/20" in last
    assert "loss 20" in last


def test_a_summary_is_that_of_the_members_that_are_finite():
    members = 7
    values = np.random.default_rng(members).normal(size=(members + 2, 4)) + 1e6
    values[1], values[3] = np.nan, np.inf
    values[:, 3] = np.nan
    rest = np.delete(values, (1, 3), 0)[:, :3]
    found = summarise(values)
    assert found.finite.tolist() == [members] * 3 + [0]
    np.testing.assert_allclose(found.mean, [*rest.mean(0), np.nan], rtol=1e-15)
    np.testing.assert_allclose(found.deviation, [*rest.std(0, ddof=1), np.nan], rtol=1e-9)
    wanted = stats.t.interval(0.95, members - 1, loc=rest.mean(0), scale=stats.sem(rest))
    np.testing.assert_allclose(np.stack(found.interval())[:, :3], wanted, rtol=1e-12)
    one = summarise(values[:1])  # says nothing of the spread
    assert np.isnan([one.deviation, *one.interval()]).all()


def test_members_are_drawn_where_an_interval_would_mislead():
    curves = np.random.default_rng(0).normal(scale=0.01, size=(8, 5)) + np.linspace(0, 1, 5)
    stuck, one = (
        np.where(np.arange(8)[:, None] < number, 0.0, curves) for number in (2, 1)
    )  # one is no group
    x = np.arange(5.0)
    for drawn, lines, bands in (
        (curves, 1, 1),
        (stuck, 9, 0),
        (one, 1, 1),
        (curves[:3], 4, 0),
        (curves[:1], 1, 0),
    ):
        _, axes = plt.subplots()
        band(axes, x, drawn, label="a", within=(0.0, 0.9))
        assert (len(axes.lines), len(axes.collections)) == (lines, bands)
        np.testing.assert_allclose(axes.lines[0].get_ydata(), drawn.mean(0))
        assert axes.get_legend_handles_labels()[1] == ["a"]
        for one in axes.collections:
            np.testing.assert_allclose(one.get_paths()[0].vertices[:, 1].max(), 0.9)
        plt.close()
    assert drawn_as(curves) == "Lines are means over 8 seeds, bands their 95 % Student intervals."
    assert "over 3 to 8 paths" in drawn_as(curves, curves[:3], members="paths")
    assert "; where paths are few" in drawn_as(curves, curves[:3], members="paths")


def test_differences_are_paired_and_flat_ones_are_named():
    base = np.array([[0.1, 0.5, 0.9], [0.2, 0.4, 0.8]])
    curves = {"trained": base, "same": base + 1e-4, "moved": base + [0.0, 0.3, 0.0]}
    _, axes = plt.subplots()
    names = {name: name.upper() for name in curves}
    differences(axes, np.arange(3), curves, names=names, looks=dict.fromkeys(curves, {}))
    drawn = {line.get_label(): line.get_ydata() for line in axes.lines}
    np.testing.assert_allclose(drawn["MOVED"], [0, 0.3, 0], atol=1e-12)
    assert [text.get_text() for text in axes.texts] == ["SAME:\nat most 0.0001"]
    plt.close()


def test_letters_in_order_and_looks_apart_without_colour():
    _, axes = plt.subplots(1, 3)
    letter(*axes)
    assert [panel.texts[0].get_text() for panel in axes] == ["a", "b", "c"]
    looks = [look(index) for index in range(7)]
    for part in ("marker", "linestyle", "color"):
        assert len({str(one[part]) for one in looks}) == 7
    assert heat(axes[0], np.array([[0.0, 1.0]]), [["no", "yes"]]).get_clim() == (0, 1)
    before = plt.rcParams["axes.spines.top"]
    with house_style():
        assert not plt.rcParams["axes.spines.top"]
    assert plt.rcParams["axes.spines.top"] == before
    assert [(text.get_text(), text.get_color()) for text in axes[0].texts[1:]] == [
        ("no", "white"),
        ("yes", "black"),
    ]
    plt.close()


def test_checks_speak_one_language():
    for value in (-1, float("nan")):
        with pytest.raises(ValueError, match="`x` must be positive and finite, got"):
            checks.check_positive("x", value)
    with pytest.raises(ValueError, match=r"`x` must be finite, got nan at index \(1, 0\)"):
        checks.check_finite("x", np.array([[1.0], [np.nan]]))
    with pytest.raises(
        TypeError, match=r"`n` must be a Python integer \(it sets a shape\), got True"
    ):
        checks.check_count("n", True)
    jax.jit(lambda x: checks.check_positive("x", x))(-1.0)  # traced: passes


def test_a_mesh_may_have_an_axis_of_data():
    devices = jax.devices("cpu")[:4]
    mesh = dissociation.member_mesh(devices, data=2)
    assert mesh.axis_names == ("members", "data")
    assert mesh.devices.tolist() == [devices[:2], devices[2:]]
    with pytest.raises(ValueError, match=r"`data` must divide the number of devices \(4\), got 3"):
        dissociation.member_mesh(devices, data=3)
