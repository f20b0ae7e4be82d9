"""The code in README.md and docs/ runs as it stands."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
BLOCKS = [
    (path.relative_to(ROOT), i, code)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]


@pytest.mark.parametrize(("path", "index", "code"), BLOCKS, ids=[f"{path}-{i}" for path, i, _ in BLOCKS])
def test_code_blocks_run(path, index, code, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"{path}, block {index}", "exec"), {})
    assert capsys.readouterr().out.strip(), "an example should show something"
