"""All figures of both packages: what they must provide, and where they are listed."""

import re
from pathlib import Path

import numpy as np
import pytest

import dissociation.figures
import koopman.figures
from dissociation.figures import Figure
from dissociation.figures import _command as command

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


WRONG = {
    ("robustness", "transfer"): {
        "num_seeds": [0, -1], "num_epochs": [-1], "num_train": [0], "num_test": [0], "width": [0, 1], "data": ["cifar"],
        "scale_factor": [0.0, -1.0, np.inf, np.nan, 1e30, 1e-30],
        "duplicate_multiplier": [0.5, 0.0, np.nan, 1e12],
    },
    ("robustness",): {"num_scales": [0, 1], "num_zero": [-1, 2**40, 10**9], "null_scale": [-0.1, np.nan, 1e38]},
    ("transfer",): {
        "num_budgets": [0], "num_splits": [1], "gradient_steps": [0], "num_zero": [-1, 2**40],
        "probes": [(), ("gradient", "gradient"), ("other",)],
    },
    ("eigenvectors",): {
        "sizes": [(), (300, 300), (0, 300)], "reference": [7], "num_seeds": [1], "num_large_seeds": [0], "large": [0],
        "num_epochs": [0], "batch_size": [0], "weight_decay": [-1.0], "noise": [-1.0, np.nan], "num_ranks": [0],
        "num_components": [0], "digit": [10, -1], "mask_norms": [(1.0, -1.0)], "num_certified": [0], "num_test": [0],
        "data": ["cifar"],
    },
    ("similarity",): {
        "num_samples": [19], "measures": [(), ("cka",), ["rsa", 5]], "rewrite_measures": [("disagreement",)],
        "num_blocks": [1], "num_seeds": [2], "num_zero": [-1, 2**40],
    },
    ("freedom",): {
        "num_samples": [1], "num_seeds": [1], "num_zero": [-1, 2**40], "spread": [-1.0, 11.0, np.nan],
        "model": ["rnn"],
    },
    ("collapse",): {
        "weight_decays": [(), (-0.1,), (0.1, 0.1)], "seeds": [(), (-1,), (2**32,)], "num_steps": [0], "width": [0],
        "num_train": [0, 99], "optimizer": ["adam"], "network": ["rnn"], "data": ["cifar"], "num_information": [-1],
        "classes": [(1, 1), (0, 10), (0, 1, 2)], "accuracy_threshold": [1.0, -0.1], "code": [0], "learning_rate": [0.0],
    },
    ("manifold",): {
        "num_tasks": [1], "num_samples": [0], "num_inputs": [0], "input_rank": [0, 21], "num_outputs": [0],
        "rank": [0, 9], "hidden": [3], "num_steps": [1], "pair_steps": [1, 502], "rate": [0.0, 1.1, np.nan],
        "depth": [0, 8], "num_scales": [1], "num_draws": [1], "condition": [0.5, np.nan],
    },
    ("planted",): {
        "num_epochs": [0], "width": [0, 10**7], "num_shown": [9], "num_more": [9], "num_passes": [0],
        "batch_size": [0], "learning_rate": [0.0, np.nan], "num_factors": [0], "strip": [9], "num_around": [9],
        "gain": [0.0, 2.0, np.nan], "num_train": [0], "num_test": [0], "data": ["cifar"],
    },
    ("compare",): {
        "measure": ["cka"], "positions": ["tokens"], "channels": ["middle"], "num_blocks": [1], "num_orders": [0],
        "max_samples": [1], "memory_budget": [0],
    },
    ("ordered-mnist",): {
        "num_seeds": [0], "num_test": [0], "num_steps": [0], "num_train": [1], "num_validation": [1],
        "num_epochs": [-1], "oracle_epochs": [-1], "models": [(), ("linear", "linear"), ("other",)],
        "num_digits": [0, 11], "far": [15], "alpha": [0.0], "batch_size": [0, 3000], "data": ["cifar"],
    },
    ("coverage",): {
        "num_seeds": [0, 1], "lengths": [(), (100,), (300, 300), (10**7,)], "level": [0.0, 1.0, np.nan],
    },
    ("fit",): {
        "lag": [0], "steps": [0, 10**7], "num_delays": [0], "num_times": [199], "rank": [0],
        "level": [0.0, 1.0], "file": ["runs.txt"],
    },
    ("spectra",): {
        "num_trajectories": [0], "order": [0, 1, 100_000], "alpha": [0.0, 1e300], "num_centres": [5, 1_000_000],
        "lengths": [(), (0,), (1000, 1000), (99,), (300, 200), (10**12,)],
        "systems": [(), ("prinz", "prinz"), ("other",)],
    },
}  # fmt: skip


@pytest.mark.parametrize(("package", "name", "figure"), FIGURES)
def test_settings_that_cannot_be_met_are_refused_at_once(package, name, figure, unchecked):
    settings = [item for names, wrong in WRONG.items() if name in names for item in wrong.items()]
    assert settings, f"WRONG lacks values that {name} refuses"
    others = "batch_size|num_train" if package == "dissociation" else "batch_size"
    for field, values in settings:
        for value in values:
            with pytest.raises(ValueError, match=f"`({others}|{field})` must "):
                figure.Config(**{field: value})
