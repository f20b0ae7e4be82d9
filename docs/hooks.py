"""Hooks of the site beyond `mkdocs.yml`: the front page, notebooks and docstrings."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import griffe
from mkdocs.config.config_options import DocsDir
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
NEEDED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}

# The configuration lies in the folder of the pages, where MkDocs wants it above: the check guards a
# `site_dir` inside the pages, which has a check of its own.
DocsDir.post_validation = lambda *_, **__: None


def on_files(files, config):
    """Add README as the front page, and a page for every notebook with its outputs."""
    readme = (
        (ROOT / "README.md")
        .read_text()
        .replace("](docs/", "](")
        .replace("[imports](notebooks/paper/)", "imports")
    )
    files.append(File.generated(config, "index.md", content=readme))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, images = page_of(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, image in images.items():
            files.append(File.generated(config, f"notebooks/{name}", content=image))
    return files


def on_page_markdown(markdown, **kwargs):
    """Return the page with links to pages of notebooks, and inner products <x, y> escaped."""
    markdown = re.sub(r"\]\((?:\.\./)+notebooks/(\w+)\.ipynb\)", r"](notebooks/\1.md)", markdown)
    return re.sub(r"<(?=\w+, )", "&lt;", markdown)


def page_of(path):
    """Return a notebook as Markdown, and its images by name."""
    parts, images = [], {}
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if output.get("name") == "stderr":
                continue
            data = {
                kind: "".join(text)
                for kind, text in output.get("data", {"text/plain": output.get("text", "")}).items()
            }
            if "image/png" in data:
                name = f"{path.stem}-{len(images)}.png"
                images[name] = base64.b64decode(data["image/png"])
                parts.append(f"![What the cell draws]({name})")
            elif "text/html" in data:
                parts.append(re.sub(r"<details>.*", "", data["text/html"], flags=re.DOTALL))
            else:
                parts.append(f"```text\n{data['text/plain'].rstrip()}\n```")
    told = f"This page is `notebooks/{path.name}` with the outputs that it keeps.\n"
    return "\n\n".join([*parts, told]), images


class Addresses(HTMLParser):
    """Collects what a page needs from other places to be shown."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        """Handle one tag."""
        given = dict(attrs)
        address = given.get(NEEDED.get(tag, ""), "") or ""
        if re.match(r"(https?:)?//", address) and given.get("rel") not in ("canonical", "edit"):
            self.found.append(f"<{tag}> {address}")


def on_post_build(config):
    """Refuses a site that would ask another server for anything to be shown."""
    needed = set()
    for page in Path(config["site_dir"]).rglob("*.html"):
        parser = Addresses()
        parser.feed(page.read_text())
        needed |= {f"{page.name}: {address}" for address in parser.found}
    if needed:
        raise PluginError(
            "Pages must need nothing from elsewhere, got " + "; ".join(sorted(needed))
        )


class Docstrings(griffe.Extension):
    """Docstrings as Markdown, with a section for examples and inner products escaped."""

    def on_object(self, *, obj, **kwargs):
        """Handle one docstring."""
        if obj.docstring:
            text = re.sub(
                r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE
            )
            parts = re.split(r"(`[^`\n]+`|^ *>>> (?:.+\n?)+)", text, flags=re.MULTILINE)
            parts[::2] = [re.sub(r"<(?=\w)", "&lt;", part) for part in parts[::2]]
            obj.docstring.value = "".join(parts)
