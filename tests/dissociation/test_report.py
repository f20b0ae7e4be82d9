"""Reports: one file, nothing outside of it, and what a browser makes of it."""

import dataclasses
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

from dissociation import report
from dissociation.exhibits import Exhibit
from dissociation.report import Tree, mapping_html, report_html, tree_html, write_report

needs_browser = pytest.mark.skipif(browser.NAME is None, reason="no browser")

ADDRESS = re.compile(r"""https?://|\bsrc=["'](?!data:)|url\((?!["']?(data:|\#))|@import|<link|<iframe""")
"""What would be fetched, or could be."""


@dataclasses.dataclass(frozen=True)
class Config:
    num_seeds: int = 3
    rates: tuple = (0.1, 0.2)


@pytest.fixture(scope="module")
def page():
    figure, axes = plt.subplots()
    axes.plot([0, 1], [1, 0])
    plt.close(figure)
    model = eqx.nn.MLP(784, 10, 200, 1, key=jax.random.key(0))
    exhibit = Exhibit("glyphs: 3 seeds", figure, "Mean and band of 3 seeds.", [["seed", "error"], ["0", "1 ± 2 %"]])
    sections = {
        "Certificates": {"scaled": {"change": 1e-7, "flips": 0}, "duplicated": {"change": np.float32(0), "flips": 2}},
        "Settings": Tree(Config()),
        "Network": Tree(model),
        "Plain": Config(),
        "Command": "python -m dissociation <x>",
    }
    return report_html("A <report>", [exhibit], sections)


def test_it_is_one_page_with_all_in_it(page):
    seen = Tags.of(re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL))
    assert seen.count("h1") == seen.count("svg") == 1
    assert [line for line in re.findall(r"<h2>(.*?)</h2>", page)] == [
        "Certificates", "Settings", "Network", "Plain", "Command",
    ]  # fmt: skip
    assert "<h1>A &lt;report&gt;</h1>" in page
    assert "<pre>python -m dissociation &lt;x&gt;</pre>" in page
    assert "<figcaption>Mean and band of 3 seeds.</figcaption>" in page
    assert "<td>1e-07</td>" in page
    assert len(page.encode()) < report.MAX_BYTES
    assert not ADDRESS.search(page)
    for outside in ('<img src="x.png">', "<a href='https://a.org'>", "a { background: url(x.png) }"):
        assert ADDRESS.search(page + outside)


def test_numbers_are_short():
    shown = mapping_html({
        "float": 1.23456789, "whole": 600.0, "large": 60_000.0, "count": 7, "nan": np.nan, "none": None, "yes": True,
        "words": ["a", "b"], "array": np.arange(3), "long": np.arange(1000.0), "object": Config,
    })  # fmt: skip
    cells = re.findall(r"<td>(.*?)</td>", shown)
    assert cells[:9] == ["1.235", "600", "60000", "7", "nan", "None", "True", "a, b", "[0, 1, 2]"]
    assert len(cells[9]) < 80
    nested = mapping_html({"a": 1, "b": {"c": 2, "d": {"e": 3}}})
    assert re.findall(r"<h3>(.*?)</h3>", nested) == ["b", "d"]
    Tags.of(nested)


def test_a_tree_is_also_text():
    shown = Tree(Config())._repr_html_()
    assert "<noscript><pre>Config(" in shown
    assert "num_seeds=3" in shown
    assert "treescope-container" in shown


def test_a_tree_that_is_too_large_is_text(monkeypatch):
    monkeypatch.setattr(report, "_MAX_TREE", 10)
    assert tree_html(Config()) == "<pre>Config(num ...</pre>"


def test_a_failed_write_leaves_the_old_report(page, tmp_path, monkeypatch):
    path = write_report(tmp_path / "report.html", "old", [], {})
    old = path.read_text()
    monkeypatch.setattr("dissociation.files.os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_report(path, "new", [], {})
    assert path.read_text() == old
    assert [other.name for other in tmp_path.iterdir()] == ["report.html"]


TELL = """<script>
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
        return json.loads(text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")), console

    return path, told


@needs_browser
def test_a_browser_shows_the_trees_and_complains_of_nothing(opened):
    _, told = opened
    found, console = told()
    assert console == []
    assert len(found["trees"]) == 2
    assert "num_seeds=3" in found["trees"][0]
    assert "float32(200, 784)" in found["trees"][1]
    assert "too large" not in found["trees"][1]
    assert not found["wide"]


@needs_browser
def test_dark_and_light_are_the_readers(opened):
    _, told = opened
    light, _ = told("--blink-settings=preferredColorScheme=1")
    dark, console = told("--blink-settings=preferredColorScheme=0")
    assert console == []
    brightness = lambda colour: sum(map(int, re.findall(r"\d+", colour)[:3])) / 765  # noqa: E731
    assert [brightness(colour) > 0.5 for colour in light["colours"]] == [True, False]
    assert [brightness(colour) > 0.5 for colour in dark["colours"]] == [False, True]


@needs_browser
def test_a_narrow_window_scrolls_in_tables_alone(opened):
    _, told = opened
    assert not told("--window-size=500,900")[0]["wide"]


@needs_browser
def test_a_page_that_comes_in_pieces_shows_its_trees_too(page, tmp_path):
    """A browser may be handed a part of a script, as at the end of a buffer, or of a packet."""
    pieces = page.replace("</body>", TELL).split("root.state.deferring = false;")
    assert len(pieces) == 3

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            if self.path == "/":
                for piece in pieces:
                    self.wfile.write(piece.encode())
                    self.wfile.flush()
                    time.sleep(0.3)
                    if piece is not pieces[-1]:
                        self.wfile.write(b"root.state.deferring = false;")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown, console = browser.run(f"http://127.0.0.1:{server.server_port}/", tmp_path, "--dump-dom")
        server.shutdown()
    assert console == []
    assert "num_seeds=3" in shown
    assert "Loading" not in shown.partition('id="told"')[2]


@needs_browser
def test_what_would_be_fetched_is_an_error_of_the_console(page, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page.replace("</body>", '<img src="https://example.org/x.png"></body>'))
    _, console = browser.run(path, tmp_path, "--dump-dom")
    assert any("Content Security Policy" in line for line in console)


@needs_browser
def test_it_prints_and_can_be_photographed(opened, tmp_path):
    path, _ = opened
    for flag, name, begins in (("--print-to-pdf", "x.pdf", b"%PDF"), ("--screenshot", "x.png", b"\x89PNG")):
        _, console = browser.run(path, tmp_path, f"{flag}={tmp_path / name}")
        assert console == []
        assert (tmp_path / name).read_bytes().startswith(begins)
    pixels = plt.imread(tmp_path / "x.png")[..., :3]
    assert (pixels.std((0, 1)) > 0.02).all()  # not an empty page
