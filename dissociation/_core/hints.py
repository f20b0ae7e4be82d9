"""Answers to names that people look for where they are not."""

import ast
import difflib
import functools
import importlib.util
from pathlib import Path

PACKAGES = ("dissociation", "koopman")

PEERS = {
    "activation_matching": "dissociation.rewrites.match_activations",
    "attainable_range": "dissociation.rewrites.cka_range",
    "centered_kernel_alignment": "dissociation.similarity.linear_cka or debiased_cka",
    "centred_kernel_alignment": "dissociation.similarity.linear_cka or debiased_cka",
    "cka": "dissociation.similarity.linear_cka or debiased_cka",
    "dmd": "koopman.fit(koopman.Ridge(), *koopman.lagged_pairs(data))",
    "early_stopping": "dissociation.training.EarlyStop",
    "earlystopping": "dissociation.training.EarlyStop",
    "edmd": "koopman.fit with features as states, or with `kernel=` and `centres=`",
    "forecast": "koopman.predict",
    "git_rebasin": "dissociation.rewrites.match_weights",
    "hankel": "koopman.delay_embed",
    "hankel_dmd": "koopman.delay_embed, then koopman.fit",
    "hsic": "dissociation.similarity.debiased_cka",
    "knn": "dissociation.similarity.mutual_knn or knn_jaccard",
    "koopman": "the package koopman: `import koopman`",
    "lmc": "dissociation.rewrites.barrier",
    "linear_mode_connectivity": "dissociation.rewrites.barrier",
    "load_mnist": 'dissociation.load("mnist")',
    "lorenz": "koopman.datasets.lorenz63",
    "mds": "dissociation.similarity.classical_mds or smacof",
    "mnist": 'dissociation.load("mnist")',
    "mutual_information": "dissociation.measures.information",
    "nc1": "dissociation.measures.neural_collapse",
    "permute_neurons": "dissociation.rewrites.permute",
    "probe": "dissociation.measures.linear_probe",
    "procrustes": "dissociation.similarity.procrustes_distance",
    "rescale": "dissociation.rewrites.scale",
    "save_checkpoint": "the argument `checkpoint=` of dissociation.training.fit",
    "sweep": "dissociation.training.fit_grid",
    "tica": "koopman.fit with ReducedRank; koopman.vamp_score",
    "timescales": "koopman.modes",
    "vamp": "koopman.fit with ReducedRank; koopman.vamp_score",
    "weight_matching": "dissociation.rewrites.match_weights",
}
"""Place of what peers call by other names, in lower case."""


@functools.cache
def exports() -> dict[str, tuple[str, ...]]:
    """Return the public names of each package and folder, without an import of them."""
    found = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        root = Path(spec.origin).parent
        for file in [root / "__init__.py", *sorted(root.glob("[!_]*/__init__.py"))]:
            dotted = ".".join([package, *file.parent.relative_to(root).parts])
            if names := _listed(file):
                found[dotted] = names
    return found


def _listed(file: Path) -> tuple[str, ...]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return tuple(ast.literal_eval(node.value))
    return ()


def hint(package: str, name: str) -> str | None:
    """Return where a name that `package` lacks is found, or None."""
    if name.startswith("_"):
        return None
    homes = [folder for folder, names in exports().items() if name in names]
    if homes:
        return f"It is in {' and in '.join(homes)}"
    if name.lower() in PEERS:
        return f"See {PEERS[name.lower()]}"
    if len(name) < 6:  # short names are near to too many
        return None
    for folder in [package, *exports()]:
        near = difflib.get_close_matches(name, exports().get(folder, ()), 1, 0.85)
        if near:
            return f"Perhaps {folder}.{near[0]}"
    return None
