"""All figures of both packages: what they must provide, and where they are listed."""

import re
from pathlib import Path

import pytest

import dissociation.figures
import koopman.figures
from dissociation.figures import Figure
from dissociation.figures import _command as command
from dissociation.figures._protocol import Settings

PACKAGES = {"dissociation": dissociation, "koopman": koopman}
FIGURES = [
    pytest.param(package, name, figure, id=f"{package}-{name}")
    for package, module in PACKAGES.items()
    for name, figure in module.figures.figures().items()
]
README = (Path(__file__).parents[1] / "README.md").read_text()
COMMANDS = [match.split() for match in re.findall(r"^python -m (\w+ .*)$", README, re.MULTILINE)]


@pytest.mark.parametrize(("package", "name", "figure"), FIGURES)
def test_it_provides_all_that_a_figure_must(package, name, figure):
    assert isinstance(figure, Figure)
    assert figure.__name__.startswith(f"{package}.figures.")
    assert figure.Config.__module__ == figure.__name__
    config = figure.Config()
    assert isinstance(config, Settings)
    assert type(config.quick()) is figure.Config
    assert config.quick() != config


def test_a_module_that_lacks_something_is_no_figure():
    assert not isinstance(command, Figure)


def test_files_of_figures_have_names_of_their_own():
    assert len({parameters.values[2].STEM for parameters in FIGURES}) == len(FIGURES)


def test_the_readme_has_every_figure_and_no_other():
    """The lines of the block of commands, by package and figure."""
    rows = re.findall(r"^python -m (\w+) ([\w-]+)", README, re.MULTILINE)
    assert rows == [tuple(parameters.values[:2]) for parameters in FIGURES]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_in_the_readme_are_understood(words, monkeypatch):
    asked = []
    produce = lambda figure, config, run, program, words: asked.append((program, figure)) or 0  # noqa: E731
    monkeypatch.setattr(command, "produce", produce)
    package, name, *options = words
    assert PACKAGES[package].figures.main([name, *options]) == 0
    assert asked == [(package, PACKAGES[package].figures.figures()[name])]
