"""Reports: one file, nothing outside of it, and what a browser makes of it."""

import html
import http.server
import json
import re
import threading
import time

import browser
import equinox as eqx
import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from browser import Tags

from dissociation.figures import Exhibit, report_html

needs_browser = pytest.mark.skipif(browser.NAME is None, reason="no browser")

ADDRESS = re.compile(
    r"""https?://|\bsrc=["'](?!data:)|url\((?!["']?(data:|\#))|@import|<link|<iframe"""
)
"""What would be fetched, or could be."""


@pytest.fixture(scope="module")
def figure():
    drawn, axes = plt.subplots()
    axes.plot([0, 1], [1, 0])
    plt.close(drawn)
    return drawn


@pytest.fixture(scope="module")
def page(figure):
    model = eqx.nn.MLP(784, 10, 200, 1, key=jax.random.key(0))
    rows = [["seed", "error"], ["0", "1 \u00b1 2 %"]]
    exhibit = Exhibit("glyphs: 3 seeds", figure, "Mean and band of 3 seeds.", rows)
    sections = {
        "certificates": {
            "scaled": {"change": 1e-7, "flips": 0},
            "duplicated": {"change": np.float32(0), "flips": 2},
        },
        "settings": {"num_seeds": 3, "rates": (0.1, 0.25), "loss": 1.23456789, "data": None},
        "network": model,
    }
    return report_html("A <report>", [exhibit], sections)


def without_scripts(page):
    return re.sub(r"<script.*?</script>|<details.*</details>", "", page, flags=re.DOTALL)


def test_it_is_one_page_with_all_in_it(page):
    seen = Tags.of(without_scripts(page).partition("<body>")[2].partition("</body>")[0])
    assert [seen.count(tag) for tag in ("h1", "figure", "img", "figcaption", "table")] == [
        1,
        1,
        1,
        1,
        3,
    ]
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["certificates", "settings", "network"]
    assert "<h1>A &lt;report&gt;</h1>" in page
    assert "<figcaption>Mean and band of 3 seeds.</figcaption>" in page
    assert '<tr><th scope="row">scaled</th><td>1e-07</td><td>0</td></tr>' in page
    assert re.findall(r"<td>(.*?)</td>", page)[-4:] == ["3", "(0.1, 0.25)", "1.235", "None"]
    assert not ADDRESS.search(page)
    for words in ("glyphs: 3 seeds", "num_seeds", "f32[200,784]"):
        assert words in without_scripts(page)
    assert ADDRESS.search(page + '<img src="x.png">')


def test_texts_are_escaped_and_hold_anything(figure):
    for words in (
        "<script>alert(1)</script>",
        r"\alpha \1 \g<0> \\",
        'a & "b"',
        "{0} %s $title $body",
        "</template>",
    ):
        exhibit = Exhibit(words, figure, words, [[words, "x"], [words, words]])
        page = report_html(
            words, [exhibit], {words: {words: words}, "other": {words: {words: words}}, "model": {}}
        )
        assert page.count(html.escape(words)) == 14
        assert words == html.escape(words) or words not in page


def test_a_figure_shows_itself_in_a_notebook_and_a_terminal(figure):
    shown = Exhibit("2 < 3 seeds", figure, "Mean & band.", [["seed", "error"], ["0", "<1 %"]])
    assert shown.text() == "2 < 3 seeds\n\nseed  error\n0     <1 %\n\nMean & band."
    seen = Tags.of(shown._repr_html_())
    assert [seen.count(tag) for tag in ("figure", "img", "figcaption", "table")] == [1, 1, 1, 1]
    assert 'alt="Mean &amp; band."' in shown._repr_html_()


TELL = """<script>
document.querySelectorAll("details").forEach(each => { each.open = true; });
addEventListener("load", () => setTimeout(() => {
  const trees = [...document.querySelectorAll("treescope-container")].map(tree => tree.shadowRoot.textContent);
  const colours = [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color];
  const wide = document.documentElement.scrollWidth > innerWidth;
  document.body.innerHTML = "<pre id=told></pre>";
  document.getElementById("told").textContent = JSON.stringify({trees, colours, wide});
}, 3000));
</script></body>"""
"""A script at the end of a page, that replaces it by what it came to."""


@pytest.fixture
def opened(page, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page)
    telling = tmp_path / "telling.html"
    telling.write_text(page.replace("</body>", TELL))

    def told(*flags):
        shown, console = browser.run(telling, tmp_path, "--dump-dom", *flags)
        text = re.search(r'<pre id="told">(.*?)</pre>', shown, re.DOTALL).group(1)
        return json.loads(
            text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        ), console

    return path, told


@needs_browser
def test_a_browser_shows_the_trees_in_the_readers_colours_and_complains_of_nothing(
    opened, page, tmp_path
):
    path, told = opened
    (light, console), (dark, _) = (
        told(f"--blink-settings=preferredColorScheme={scheme}") for scheme in (1, 0)
    )
    assert console == []
    assert "float32(200, 784)" in light["trees"][0]
    assert not light["wide"]
    assert not told("--window-size=500,900")[0]["wide"]  # tables scroll
    brightness = lambda colour: sum(map(int, re.findall(r"\d+", colour)[:3])) / 765  # noqa: E731
    assert [brightness(colour) > 0.5 for colour in light["colours"]] == [True, False]
    assert [brightness(colour) > 0.5 for colour in dark["colours"]] == [False, True]
    path.write_text(page.replace("</body>", '<img src="https://example.org/x.png"></body>'))
    _, console = browser.run(path, tmp_path, "--dump-dom")
    assert any("Content Security Policy" in line for line in console)  # nothing is fetched


@needs_browser
def test_a_page_that_comes_in_pieces_shows_its_trees_too(page, tmp_path):
    """A browser may be handed a part of a script, as at the end of a buffer, or of a packet."""
    pieces = page.replace("</body>", TELL).split("root.state.deferring = false;")
    assert len(pieces) == 2

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            for piece in (
                (pieces[0], f"root.state.deferring = false;{pieces[1]}") if self.path == "/" else ()
            ):
                self.wfile.write(piece.encode())
                self.wfile.flush()
                time.sleep(0.3)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown, console = browser.run(
            f"http://127.0.0.1:{server.server_port}/", tmp_path, "--dump-dom"
        )
        server.shutdown()
    assert console == []
    assert "float32(200, 784)" in shown.partition('id="told"')[2]
    assert "Loading" not in shown.partition('id="told"')[2]


@needs_browser
def test_it_prints_and_can_be_photographed(opened, tmp_path):
    path, _ = opened
    for flag, name, begins in (
        ("--print-to-pdf", "x.pdf", b"%PDF"),
        ("--screenshot", "x.png", b"\x89PNG"),
    ):
        _, console = browser.run(path, tmp_path, f"{flag}={tmp_path / name}")
        assert console == []
        assert (tmp_path / name).read_bytes().startswith(begins)
    pixels = plt.imread(tmp_path / "x.png")[..., :3]
    assert (pixels.std((0, 1)) > 0.02).all()  # not an empty page
