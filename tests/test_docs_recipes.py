"""The code in docs/recipes/ runs as it stands."""

import pytest
from pages import PAGES, blocks_of, check_block

RECIPES = [page for page in PAGES if page.parent.name == "recipes"]


@pytest.mark.parametrize(("path", "index", "code"), blocks_of(RECIPES))
def test_code_blocks_run(path, index, code, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    check_block(path, index, code, capsys)
