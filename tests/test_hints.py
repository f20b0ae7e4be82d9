"""Names that are found, and answers to those that are elsewhere."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys

import pytest

import dissociation
import koopman
from dissociation._core.hints import PEERS, exports, hint


@pytest.mark.parametrize("package", ["dissociation", "koopman"])
def test_folders_are_attributes_in_a_fresh_process(package):
    folders = [dotted for dotted in exports() if dotted.startswith(f"{package}.")]
    assert folders
    lines = [
        f"import {package}",
        *(f"assert {dotted}.__name__ == {dotted!r}" for dotted in folders),
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_exports_are_those_of_the_folders():
    for dotted, names in exports().items():
        assert sorted(names) == sorted(importlib.import_module(dotted).__all__)


def test_every_answer_names_what_exists():
    """Dotted names in answers resolve."""
    for answer in PEERS.values():
        for dotted in re.findall(r"(?:dissociation|koopman)(?:\.\w+)+", answer):
            module, _, name = dotted.rpartition(".")
            assert hasattr(importlib.import_module(module), name), dotted
        folder = re.match(r"((?:dissociation|koopman)(?:\.\w+)*)\.\w+ or (\w+)$", answer)
        if folder:
            assert hasattr(importlib.import_module(folder[1]), folder[2])


@pytest.mark.parametrize(
    ("package", "name", "words"),
    [
        (
            dissociation,
            "match_weights",
            "has no attribute 'match_weights'. It is in dissociation.rewrites.",
        ),
        (koopman, "lorenz63", "It is in koopman.datasets."),
        (koopman, "permute", "It is in dissociation and in dissociation.rewrites."),
        (dissociation, "cka", "See dissociation.similarity.linear_cka or debiased_cka."),
        (dissociation, "EDMD", "See koopman.fit"),
        (dissociation.similarity, "debiased_ckaa", "Perhaps dissociation.similarity.debiased_cka."),
        (dissociation, "fit_gird", "Perhaps dissociation.fit_grid."),
    ],
)
def test_a_name_that_is_elsewhere_is_answered(package, name, words):
    with pytest.raises(ImportError, match=re.escape(words)):
        getattr(package, name)
    with pytest.raises(ImportError, match=re.escape(words)):
        exec(f"from {package.__name__} import {name}")


@pytest.mark.parametrize(
    "name",
    ["__wrapped__", "_ipython_display_", "load_tests", "pytest_plugins", "setup_module", "x"],
)
def test_other_names_are_missing_as_python_has_it(name):
    for package in (dissociation, koopman, dissociation.rewrites):
        assert not hasattr(package, name)
        assert hint(package.__name__, name) is None


ELSEWHERE = {
    "submit",
    "result",
    "done",
    "get_executor",
    "step",
    "init",
    "callback",
    "start",
    "batches",
    "function",
    "register",
    "fold_in",
    "if_array",
    "named_key",
    "with_sizes",
}
"""Results of calls, functions of JAX and Equinox by their last name, and two private ones."""


def test_calls_that_docstrings_name_exist():
    modules = [importlib.import_module(package) for package in ("dissociation", "koopman")]
    for package in list(modules):
        names = [
            module.name
            for module in pkgutil.iter_modules(package.__path__)
            if not module.name.startswith("_")
        ]
        modules += [
            importlib.import_module(f"{package.__name__}.{name}")
            for name in names
            if name != "fig4"
        ]
    public = {
        name: getattr(module, name) for module in modules for name in getattr(module, "__all__", ())
    }
    known = (
        set(public)
        | ELSEWHERE
        | {name for one in public.values() if inspect.isclass(one) for name in dir(one)}
    )
    wrong = []
    for name, one in public.items():
        own = (
            [one, *(part for part in vars(one).values() if callable(part))]
            if inspect.isclass(one)
            else [one]
        )
        for part in own:
            parameters = (
                set(inspect.signature(part).parameters) if inspect.isfunction(part) else set()
            )
            for call in re.findall(r"`([A-Za-z_][\w.]*)\(", part.__doc__ or ""):
                first, _, last = call.partition(".")[0], *call.rpartition(".")[1:]
                if (
                    first not in {"jax", "jnp", "np", "numpy", "eqx", "optax"}
                    and last not in known | parameters
                ):
                    wrong.append((name, call))
    assert wrong == []
