#!/usr/bin/env python3
"""Measure how densely a package is written.

    python tests/tools/readable.py [--files N] [PATH ...]    # default: dissociation koopman

Columns: lines; code tokens (names, operators, numbers); tokens per statement and per non-blank
line; tuple assignments `a, b = x, y` that are not swaps, conditional expressions and
comprehensions, each per 1000 statements; nested comprehensions; bindings of words that say nothing
(`found`, `own`, `each` ...) per 1000 statements; most fields of a class, or attributes that one
`__init__` sets. Equinox, Lineax, Optimistix, Diffrax and Penzai have 9.9 to 12.5 tokens a
statement, 0 to 1 tuple assignments, 0 to 11 conditional expressions, 1 to 30 comprehensions, 0.4 to
5 vague names. With --files N the N densest files follow, and the vague names by count.
"""

import ast
import collections
import io
import sys
import tokenize
from pathlib import Path

VAGUE = set(
    [
        "own",
        "found",
        "kept",
        "said",
        "heard",
        "each",
        "given",
        "known",
        "there",
        "whole",
        "rest",
        "other",
        "others",
        "made",
        "held",
        "one",
        "some",
        "left",
        "right",
        "part",
        "parts",
        "place",
        "places",
        "more",
        "least",
        "most",
        "asked",
        "few",
        "seen",
        "shown",
        "about",
        "here",
        "now",
        "then",
        "both",
        "same",
        "wanted",
        "got",
    ]
)
COMPREHENSIONS = (ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)


def is_docstring(node):
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def is_packed(node):
    """Return True for `a, b = x, y` unless it swaps its own targets."""
    if not isinstance(node, ast.Assign):
        return False
    value = node.value
    values = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    targets = [target for target in node.targets if isinstance(target, ast.Tuple)]
    if not targets or not any(isinstance(part, ast.Tuple) for part in values):
        return False
    names = sorted(map(ast.unparse, targets[0].elts))
    return not (isinstance(value, ast.Tuple) and names == sorted(map(ast.unparse, value.elts)))


def num_fields(node):
    """Return the number of annotated fields of a class, or of attributes that an `__init__` sets."""
    if isinstance(node, ast.ClassDef):
        return sum(isinstance(statement, ast.AnnAssign) for statement in node.body)
    if isinstance(node, ast.FunctionDef) and node.name == "__init__":
        stores = [
            item
            for item in ast.walk(node)
            if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
        ]
        return len({item.attr for item in stores})
    return 0


def measure(paths):
    count, vague = collections.Counter(), collections.Counter()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        count["lines"] += text.count("\n")
        count["filled"] += sum(bool(line.strip()) for line in text.splitlines())
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            count["tokens"] += token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER)
        for node in ast.walk(ast.parse(text)):
            count["statements"] += isinstance(node, ast.stmt) and not is_docstring(node)
            count["packed"] += is_packed(node)
            count["ternary"] += isinstance(node, ast.IfExp)
            if isinstance(node, COMPREHENSIONS):
                count["comprehensions"] += 1
                inner = (item for child in ast.iter_child_nodes(node) for item in ast.walk(child))
                count["nested"] += any(isinstance(item, COMPREHENSIONS) for item in inner)
            name = None
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            elif isinstance(node, ast.arg):
                name = node.arg
            if name in VAGUE:
                vague[name] += 1
            count["fields"] = max(count["fields"], num_fields(node))
    return count, vague


def row(name, count, vague):
    statements = max(count["statements"], 1)
    per = 1000 / statements
    return (
        f"{name[:44]:44} {count['lines']:7} {count['tokens']:8} {count['tokens'] / statements:6.1f}"
        f" {count['tokens'] / max(count['filled'], 1):6.1f} {count['packed'] * per:7.1f} {count['ternary'] * per:8.0f}"
        f" {count['comprehensions'] * per:6.0f} {count['nested']:6} {sum(vague.values()) * per:6.1f} {count['fields']:6}"
    )


def main(arguments):
    files = 0
    if "--files" in arguments:
        at = arguments.index("--files")
        files = int(arguments[at + 1])
        del arguments[at : at + 2]
    roots = [Path(argument) for argument in arguments] or [Path("dissociation"), Path("koopman")]
    print(
        f"{'':44} {'lines':>7} {'tokens':>8} {'/stmt':>6} {'/line':>6} {'tuples':>7} {'ternary':>8} {'compr.':>6} {'nested':>6}"
        f" {'vague':>6} {'fields':>6}"
    )
    every, single = [], []
    for root in roots:
        paths = sorted(root.rglob("*.py")) if root.is_dir() else [root]
        every += paths
        print(row(str(root), *measure(paths)))
        single += [(measure([path]), path) for path in paths] if files else []
    if len(roots) > 1:
        print(row("together", *measure(every)))
    dense = [item for item in single if item[0][0]["statements"] > 40]
    dense.sort(key=lambda item: -item[0][0]["tokens"] / item[0][0]["statements"])
    for (count, vague), path in dense[:files]:
        print(row(str(path), count, vague))
    if files:
        print(", ".join(f"{name} {number}" for name, number in measure(every)[1].most_common(24)))


if __name__ == "__main__":
    main(sys.argv[1:])
