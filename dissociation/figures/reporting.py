"""A figure's run as an exhibit, and as a report."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.figure

from dissociation import provenance
from dissociation.exhibits import Exhibit
from dissociation.figures.protocol import Figure
from dissociation.report import MAX_BYTES, Tree, report_html
from dissociation.sweeps import Grid

ELSEWHERE = ("figure", "config", "seed", "axes", "seconds", "environment")
"""What a run's description says and a report shows in sections of its own, or not."""


def exhibit_of(figure: Figure, results: Any, drawn: matplotlib.figure.Figure | None = None) -> Exhibit:
    """A figure with headline, caption and table.

    Args:
        figure: A module of figures.
        results: What its `compute` returned.
        drawn: What its `draw` made of them, if that was done.
    """
    table = figure.table(results)
    spread = any("±" in cell for row in table for cell in row)
    return Exhibit(
        headline=figure.headline(results),
        figure=figure.draw(results) if drawn is None else drawn,
        caption=figure.caption(results) + (" In the table, ± is one standard deviation." if spread else ""),
        table=table,
    )


def report_of(
    figure: Figure, exhibit: Exhibit, config: Any, results: Any, description: Mapping[str, Any], words: Sequence[str]
) -> str:
    """The report of a run, as HTML.

    Args:
        figure: A module of figures.
        exhibit: Its `exhibit_of`.
        config: What was asked for.
        results: What was computed; its `member`, if it has one, is shown.
        description: What the JSON beside the figure says.
        words: The command that made it.
    """
    sections: dict[str, Any] = {name: value for name, value in description.items() if name not in ELSEWHERE}
    scalars = {name: value for name, value in sections.items() if not isinstance(value, Mapping)}
    sections = {name: value for name, value in sections.items() if name not in scalars}
    sections |= {"further numbers": scalars} if scalars else {}
    data = sections.pop("data", None)
    sections["settings"] = Tree(config)
    sections |= {} if data is None else {"data": data}
    if (model := getattr(results, "member", None)) is not None:
        sections["one of the networks"] = Tree(model)
    seconds = {f"{name} (s)": value for name, value in description["seconds"].items()}
    memory = {f"peak on {name} (MiB)": round(size / 2**20) for name, size in provenance.peak_memory().items()}
    sections["time and memory"] = seconds | memory
    sections["environment"] = provenance.environment() | {"seed": description["seed"]}
    sections["command"] = shlex.join(words)
    title = figure.SHOWS.rstrip(".")
    return report_html(title, [exhibit], {name[:1].upper() + name[1:]: value for name, value in sections.items()})


def sweep_report_of(
    figure: Figure, grid: Grid, made: Sequence[Exhibit], left: Sequence[str], seed: int, words: Sequence[str]
) -> str:
    """The report of a sweep, as HTML: one table of all configurations, and their figures, as many as there is room for.

    Args:
        figure: A module of figures.
        grid: The configurations.
        made: What each of them made.
        left: Arrays that the sweep's own file lacks.
        seed: Of all.
        words: The command that made them.
    """
    members = [", ".join(f"{name} = {value}" for name, value in member.items()) for member in grid]
    table = tidy(grid, [each.table for each in made])
    exhibits, room = [], MAX_BYTES * 4 // 5
    for name, each in zip(members, made, strict=True):
        exhibits.append(each._replace(headline=f"{name}: {each.headline}", table=each.table if table is None else []))
        room -= len(exhibits[-1].html().encode())
        if room < 0:
            exhibits.pop()
            break
    sections: dict[str, Any] = {"Environment": provenance.environment() | {"seed": seed}, "Command": shlex.join(words)}
    if left:
        sections = {"Arrays without a common shape, in the files of configurations alone": ", ".join(left)} | sections
    if rest := members[len(exhibits) :]:
        sections = {"Not shown for want of room, see their own folders": "\n".join(rest)} | sections
    size = " x ".join(f"{count} {name}" for name, count in zip(grid.axes, grid.shape, strict=True))
    return report_html(f"{figure.SHOWS.rstrip('.')}: {size}", exhibits, sections, table=table)


def tidy(grid: Grid, tables: Sequence[Sequence[Sequence[str]]]) -> list[list[str]] | None:
    """Tables of all members of a grid in one, the grid's quantities in its first columns; None if columns differ."""
    if any(list(table[0]) != list(tables[0][0]) for table in tables):
        return None
    rows = [[*map(str, member.values()), *row] for member, table in zip(grid, tables, strict=True) for row in table[1:]]
    return [[*next(iter(grid)), *tables[0][0]], *rows]
