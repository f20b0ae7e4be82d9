from pathlib import Path

HERE = Path(__file__).parent


def test_every_notebook_has_its_test():
    notebooks = {path.stem for path in (HERE.parents[1] / "notebooks").glob("*.ipynb")}
    assert {path.stem for path in HERE.glob("test_*_notebook.py")} == {f"test_{name}_notebook" for name in notebooks}
