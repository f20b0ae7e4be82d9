"""The library is written plainly: limits of what `tests/tools/readable.py` measures."""

from pathlib import Path

import readable

ROOT = Path(__file__).parents[1]
FILES = sorted(path for name in ("dissociation", "koopman") for path in (ROOT / name).rglob("*.py"))
MOST_TOKENS = 351_600
"""Code tokens of both packages. New features raise it by what they need."""
PER_STATEMENT = {
    "packed": 0.003,
    "ternary": 0.020,
    "comprehensions": 0.050,
}


def test_statements_hold_one_thought():
    count, vague = readable.measure(FILES)
    statements = count["statements"]
    assert count["tokens"] <= MOST_TOKENS
    assert count["tokens"] / statements <= 12.5
    for name, limit in PER_STATEMENT.items():
        assert count[name] / statements <= limit, name
    assert count["nested"] <= 5
    assert sum(vague.values()) / statements <= 0.008, vague.most_common(10)


def test_no_file_is_dense():
    dense = []
    for path in FILES:
        count, _ = readable.measure([path])
        if count["statements"] > 40 and count["tokens"] / count["statements"] > 16:
            dense.append(path.relative_to(ROOT).as_posix())
    assert dense == []


def test_the_script_counts_what_it_names(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        '"""Module."""\n'
        "a, b = b, a\n"
        "found, c = 1, 2\n"
        "d = [[e for e in f] for f in c if e] if a else b\n"
    )
    count, vague = readable.measure([module])
    numbers = {name: count[name] for name in ("statements", "packed", "ternary", "comprehensions")}
    assert numbers == {"statements": 3, "packed": 1, "ternary": 1, "comprehensions": 2}
    assert (count["nested"], dict(vague)) == (1, {"found": 1})
    # Strings and comments are no tokens; names, operators and numbers are.
    assert count["tokens"] == 7 + 7 + 21
