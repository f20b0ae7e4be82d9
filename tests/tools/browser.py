"""Check that pages of HTML are well formed, and open them in a headless browser, if there is one."""

import html.parser
import re
import shutil
import subprocess

NAME = next(
    (
        name
        for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
        if shutil.which(name)
    ),
    None,
)


def run(address, folder, *flags):
    """Open a file or an address, and return the browser's output and the messages of its console."""
    words = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        "--v=0",
    ]
    words += [
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1100,4000",
        "--virtual-time-budget=10000",
        *flags,
    ]
    where = address if isinstance(address, str) else address.as_uri()
    done = subprocess.run(
        [NAME, *words, where], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout, [
        line for line in done.stderr.splitlines() if re.search(r":CONSOLE[:(]", line)
    ]


class Tags(html.parser.HTMLParser):
    """Parser that counts elements, and raises if one is closed in the wrong order."""

    VOID = ("img", "meta")

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    @classmethod
    def of(cls, text):
        parser = cls()
        parser.feed(text)
        assert not parser.open
        return parser.seen
