"""Figures of models: panels, bands, units, images and dates."""

import jax
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from koopman import PrincipalComponents, fit_exponentials, fit_model, plot_lags, scan_lags
from koopman._models._drawing import _leading_columns

pytestmark = pytest.mark.usefixtures("x64")


def decaying_rotation(num_steps, noise, seed=0):
    """Return states [time, 2] of a rotation with random kicks."""
    rng = np.random.default_rng(seed)
    matrix = 0.97 * np.array([[np.cos(0.3), np.sin(0.3)], [-np.sin(0.3), np.cos(0.3)]])
    states = np.zeros((num_steps, 2))
    states[0] = 2.0, 0.0
    for step in range(1, num_steps):
        states[step] = states[step - 1] @ matrix + noise * rng.normal(size=2)
    return states


def panels(figure):
    """Return the four panels, after the figure was rendered and left pyplot."""
    figure.canvas.draw()
    assert not plt.fignum_exists(figure.number)
    assert len(figure.axes) == 4
    return figure.axes


def collections_of(panel):
    return [artist.get_paths()[0].vertices for artist in panel.collections if artist.get_paths()]


@pytest.fixture(scope="module")
def model():
    with jax.enable_x64(True):
        return fit_model([decaying_rotation(300, 0.3), decaying_rotation(250, 0.3, 1)])


def test_a_model_draws_its_numbers(model):
    eigenvalues, rates, shapes, forecast = panels(model.plot(20))
    table = model.rates()
    (pair,) = [line for line in eigenvalues.lines if line.get_marker() == "o"]
    expected = 0.97 * np.exp(0.3j)
    drawn = pair.get_xdata() + 1j * pair.get_ydata()
    np.testing.assert_allclose(np.sort_complex(drawn), [expected.conj(), expected], atol=0.05)

    (point,) = [line for line in rates.lines if line.get_marker() == "o"]
    np.testing.assert_allclose(np.asarray(point.get_xdata(), float), table.frequency)
    np.testing.assert_allclose(np.asarray(point.get_ydata(), float), table.growth)
    assert rates.get_ylabel() == "growth (1/step)"
    # Caps of intervals stay off the edges.
    low, high = rates.get_xlim()
    assert low < 0
    assert table.frequency_high.max() < 0.95 * high
    assert shapes.lines[0].get_ydata().max() == 1
    predicted = model.predict(20).isel(run=0)
    means = [line for line in forecast.lines if line.get_linestyle() == "-"]
    np.testing.assert_allclose(means[0].get_ydata(), predicted["mean"][:, 0])
    np.testing.assert_allclose(means[0].get_xdata(), predicted.time)
    heights = np.concatenate([vertices[:, 1] for vertices in collections_of(forecast)])
    np.testing.assert_allclose(heights.max(), predicted.high.max())
    np.testing.assert_allclose(heights.min(), predicted.low.min())


def test_exponentials_draw_rates_and_dates():
    days = pd.date_range("2024-01-01", periods=200, freq="2h")
    times = np.arange(200) / 12
    states = np.exp(-0.05 * times)[:, None] * np.cos(2 * times[:, None] + np.arange(6))
    states += 0.05 * np.random.default_rng(0).normal(size=states.shape)
    frame = pd.DataFrame(states, days, columns=list("abcdef"))
    fitted = fit_exponentials(frame)
    eigenvalues, rates, shapes, forecast = panels(fitted.plot(30))
    drawn = eigenvalues.lines[-1]
    expected = np.exp((-0.05 + 2j) / 12)
    np.testing.assert_allclose(drawn.get_xdata(), expected.real, atol=0.01)
    np.testing.assert_allclose(np.abs(drawn.get_ydata()), expected.imag, atol=0.01)
    assert rates.get_ylabel() == "growth (1/day)"
    labels = [label.get_text() for label in shapes.get_xticklabels()]
    assert labels == list("abcdef")
    assert forecast.get_xlabel() == "date"
    # The fit goes through the data, and a mark shows where these end.
    (end,) = [line for line in forecast.lines if line.get_linestyle() == "--"]
    assert pd.Timestamp(end.get_xdata()[0]) == days[-1]


def test_mode_shapes_of_images_are_images():
    shape = np.random.default_rng(0).normal(size=(2, 35))
    images = (decaying_rotation(120, 0.3) @ shape).reshape(-1, 7, 5)
    figure = fit_model([images], PrincipalComponents(2)).plot(10)
    _, _, shapes, forecast = panels(figure)
    (image,) = shapes.images
    assert image.get_array().shape == (7, 5)
    assert np.abs(image.get_array()).max() == 1
    # One mode, and its strongest pixel.
    strongest = np.argmax(np.hypot(*shape))
    (label,) = [text.get_text() for text in forecast.get_legend().get_texts()]
    assert label == f"row {strongest // 5}, column {strongest % 5}"


def test_pixels_of_modes_are_apart():
    peaks = np.exp(-0.1 * (np.arange(30) - 11.0) ** 2)
    shapes = np.stack([peaks, 0.9 * peaks]).reshape(2, 1, 30)
    assert _leading_columns(np.ones((5, 30)), shapes) == [11, 7]


def test_unresolved_modes_are_open():
    states = decaying_rotation(30, 0.0)
    eigenvalues = panels(fit_model(states).plot(5))[0]
    (pair,) = [line for line in eigenvalues.lines if line.get_marker() == "o"]
    assert pair.get_markerfacecolor() == "none"


def test_lags_draw_rates_and_the_test():
    scan = scan_lags(decaying_rotation(1500, 0.3), [1, 2, 4])
    scan["resolved"] = scan.resolved & (scan.lag < 4)
    figure = plot_lags(scan)
    figure.canvas.draw()
    growth, _, consistency = figure.axes
    np.testing.assert_allclose(growth.lines[0].get_xdata(), [1, 2, 4])
    np.testing.assert_allclose(growth.lines[0].get_ydata(), scan.growth[:, 0])
    dots = [line for line in growth.lines if line.get_marker() == "o"]
    assert [dot.get_markerfacecolor() == "none" for dot in dots] == [False, False, True]
    points = [bars.lines[0] for bars in consistency.containers]
    assert len({line.get_marker() for line in points}) == 3
    drawn = np.asarray([line.get_xdata() for line in points], float)
    np.testing.assert_allclose(drawn, scan.ck_predicted[:, 0])
    labels = [text.get_text() for text in consistency.get_legend().get_texts()]
    assert labels == ["lag 1", "lag 2", "lag 4"]
    assert growth.get_xlabel() == "lag (step)"
