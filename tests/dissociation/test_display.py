"""What notebooks show of arrays and models, read back from the HTML."""

import base64
import io
import re

import equinox as eqx
import jax
import numpy as np
import pytest
from browser import Tags
from matplotlib.image import imread

from dissociation.plotting import show, table


def image_of(shown):
    encoded = re.search(
        r'<img [^>]*src="data:image/png;base64,([^"]+)"', shown._repr_html_()
    ).group(1)
    return imread(io.BytesIO(base64.b64decode(encoded)), format="png")


def test_images_stand_side_by_side():
    images = np.zeros((2, 28, 28), np.float32)
    images[1] = 1.0
    seen = image_of(show(images))
    assert seen.shape == (112, 4 * (28 + 1 + 28), 4)
    assert (seen[:, :112, 0] == 0).all()
    assert (seen[:, 112:, :3] == 1).all()


def test_signs_are_red_and_blue_about_zero():
    red, _, blue = np.moveaxis(image_of(show(np.array([[-2.0, 0.0, 2.0]])))[..., :3], -1, 0)
    middle = [56, 168, 280]
    assert red[0, middle[0]] < blue[0, middle[0]]
    assert red[0, middle[2]] > blue[0, middle[2]]
    assert abs(red[0, middle[1]] - blue[0, middle[1]]) < 0.02


def test_models_are_text_with_a_view_to_open():
    model = eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))
    page = show(model)._repr_html_()
    before, view = page.split("<details>")
    assert "MLP(" in before
    assert "<script" not in before
    assert "treescope" in view
    assert "f32[4,2]" in repr(show(model))


def test_a_table_is_html_and_text():
    shown = table([["seed", "error"], ["0", "< 2 %"]])
    assert '<th scope="col">error</th>' in shown._repr_html_()
    assert '<th scope="row">0</th><td>&lt; 2 %</td>' in shown._repr_html_()
    Tags.of(shown._repr_html_())
    assert repr(shown).splitlines() == ["seed  error", "0     < 2 %"]
    for rows in ([], [["a", "b"], ["c"]]):
        with pytest.raises(
            ValueError, match="`rows` must be at least one row, all of the same length"
        ):
            table(rows)
    with pytest.raises(ValueError, match="`value` must have elements"):
        show(np.zeros((0, 3)))
