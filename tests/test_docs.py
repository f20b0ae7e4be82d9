"""The code in README.md and docs/ runs as it stands, and the pages hold what they are for."""

import ast
import re

import pytest
from faces import FACES
from pages import PAGES, ROOT, blocks_of, check_block, unknown_names

OTHER_PAGES = [page for page in PAGES if page.parent.name != "recipes"]


@pytest.mark.parametrize(("path", "index", "code"), blocks_of(OTHER_PAGES))
def test_code_blocks_run(path, index, code, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    check_block(path, index, code, capsys)


@pytest.mark.parametrize(("path", "index", "code"), blocks_of(PAGES, is_executed=False))
def test_code_blocks_use_names_that_exist(path, index, code):
    assert unknown_names(code) == []


def test_an_unknown_name_of_a_block_is_found():
    code = "import koopman.datasets as data\nfrom dissociation import training\n"
    code += "training.fit, data.nonsense, training.Grid.lost"
    assert unknown_names(code) == ["data.nonsense", "training.Grid.lost"]
    with pytest.raises(ImportError):
        unknown_names("from dissociation import nonsense")


def test_the_api_has_every_public_name():
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    documented = set(re.findall(r"^(?:::: |- `)([\w.]+)", pages, re.MULTILINE))
    public = {f"{face}.{name}" for face, names in FACES.items() for name in names}
    assert not public ^ documented, (
        f"not both public and in docs/api: {', '.join(sorted(public ^ documented))}"
    )


def test_the_navigation_has_every_page():
    written = (ROOT / "docs" / "mkdocs.yml").read_text()
    navigation = set(re.findall(r"([\w/-]+\.md)$", written.split("nav:")[1], re.MULTILINE))
    pages = {str(path.relative_to(ROOT / "docs")) for path in PAGES[1:]}
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert navigation == pages | notebooks | {"index.md"}  # which is README


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\((?!\w+:)([^)#]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_every_page_but_those_of_the_api_is_linked():
    text = "".join(path.read_text() for path in PAGES)
    assert [
        path.name for path in PAGES[1:] if f"{path.name})" not in text and path.parent.name != "api"
    ] == []


def test_files_to_change_hold_what_the_page_says():
    """The lines read: a task, then files, each with the names in it."""
    page = (ROOT / "docs" / "contributing.md").read_text()
    section = page.split("## Where to change what")[1].split("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| (`.+) \|$", section, re.MULTILINE)
    assert len(rows) >= 15
    for row in rows:
        for entry in row.split("; "):
            path, *names = re.findall(r"`([^`]+)`", entry)
            text = (ROOT / path).read_text()
            assert names, path
            for name in names:
                definition = rf"^ *(?:def |class )?{re.escape(name)} *[(:=]"
                assert re.search(definition, text, re.MULTILINE), f"{path} lacks {name}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 900


FIRST_WORDS = {"What", "Which", "Of", "That", "As", "Where", "Whether", "How", "Whose", "Those"}


def docstrings(tree):
    """Texts that stand as statements: of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value.value


@pytest.mark.parametrize("package", ["dissociation", "koopman"])
def test_docstrings_begin_with_a_verb_or_a_noun(package):
    for path in (ROOT / package).rglob("*.py"):
        for text in docstrings(ast.parse(path.read_text())):
            assert text.split()[0] not in FIRST_WORDS, f"{path}: {text}"
