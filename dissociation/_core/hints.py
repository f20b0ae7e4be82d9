"""Answers to names that people look for where they are not."""

import ast
import difflib
import functools
import importlib.util
from pathlib import Path

PACKAGES = ("dissociation", "koopman")

PEERS = {
    "activation_matching": "dissociation.rewrites.match_activations",
    "apply_permutation": "dissociation.rewrites.permute, or `apply` of the result of match_weights",
    "attainable_range": "dissociation.rewrites.cka_range",
    "bootstrap": "dissociation.similarity.compare(..., num_blocks=20), which has jackknife "
    "intervals",
    "calc_rdm": "dissociation.similarity.rdm",
    "centered_kernel_alignment": "dissociation.similarity.linear_cka or debiased_cka",
    "centred_kernel_alignment": "dissociation.similarity.linear_cka or debiased_cka",
    "cka": "dissociation.similarity.linear_cka or debiased_cka",
    "compare_layers": "dissociation.similarity.compare of two dictionaries of layers",
    "compute_rdm": "dissociation.similarity.rdm",
    "dmd": "koopman.fit(koopman.Ridge(), *koopman.lagged_pairs(data))",
    "early_stopping": "dissociation.training.EarlyStop",
    "earlystopping": "dissociation.training.EarlyStop",
    "edmd": "koopman.fit with features as states, or with `kernel=` and `centres=`",
    "fit_mnist": "dissociation.recipes.fit_classifiers",
    "feature_extractor": "dissociation.models.representations",
    "featureextractor": "dissociation.models.representations",
    "forecast": "koopman.predict",
    "from_torch": "dissociation.data.load_state, and the page docs/recipes/pytorch.md",
    "get_activations": "dissociation.models.representations",
    "git_rebasin": "dissociation.rewrites.match_weights",
    "hankel": "koopman.delay_embed",
    "hankel_dmd": "koopman.delay_embed, then koopman.fit",
    "hankeldmd": "koopman.delay_embed, then koopman.fit",
    "hsic": "dissociation.similarity.debiased_cka",
    "implied_time_scales": "koopman.modes(operator).implied_time_scale",
    "implied_timescales": "koopman.modes(operator).implied_time_scale",
    "kernel_dmd": "koopman.fit with `kernel=`",
    "kerneldmd": "koopman.fit with `kernel=`",
    "kerneledmd": "koopman.fit with `kernel=`",
    "kernelridge": "koopman.fit with `kernel=`",
    "knn": "dissociation.similarity.mutual_knn or knn_jaccard",
    "koopman": "the package koopman: `import koopman`",
    "layout": "the arguments mesh, member_map and members_per_batch of dissociation.training.fit",
    "linear_mode_connectivity": "dissociation.rewrites.barrier",
    "linearcka": "dissociation.similarity.linear_cka",
    "linearmetric": "dissociation.similarity.angular_distance or procrustes_distance",
    "lmc": "dissociation.rewrites.barrier",
    "load_state_dict": "dissociation.data.load_state",
    "load_mnist": 'dissociation.load("mnist")',
    "logisticregression": "dissociation.measures.linear_probe",
    "lorenz": "koopman.datasets.lorenz63",
    "mds": "dissociation.similarity.classical_mds or smacof",
    "mnist": 'dissociation.load("mnist")',
    "msm": "koopman.transition_matrix",
    "mutual_information": "dissociation.measures.information",
    "nc1": "dissociation.measures.neural_collapse",
    "nystroemkernel": "koopman.fit with `kernel=` and `centres=`",
    "nystroemkernelridge": "koopman.fit with `kernel=` and `centres=`",
    "permutation_spec": "dissociation.rewrites.neuron_groups: no specification is needed",
    "permutationmetric": "dissociation.similarity.hard_matching",
    "permutationspec": "dissociation.rewrites.neuron_groups: no specification is needed",
    "permute_neurons": "dissociation.rewrites.permute",
    "plot_similarity_matrix": "dissociation.plotting.heat",
    "probe": "dissociation.measures.linear_probe",
    "procrustes": "dissociation.similarity.procrustes_distance",
    "rescale": "dissociation.rewrites.scale",
    "rsm": "dissociation.similarity.rdm, of dissimilarities",
    "save_checkpoint": "the argument `checkpoint=` of dissociation.training.fit",
    "shapemetric": "dissociation.similarity.angular_distance or procrustes_distance",
    "stitching": "dissociation.measures.transfer_errors",
    "sweep": "dissociation.training.fit_grid",
    "symmetry": "dissociation.rewrites, and the page docs/symmetry.md",
    "systems": "koopman.datasets",
    "tica": "koopman.fit with ReducedRank; koopman.vamp_score",
    "time_delay_embedding": "koopman.delay_embed",
    "timedelay": "koopman.delay_embed",
    "timedelayembedding": "koopman.delay_embed",
    "timescales": "koopman.modes",
    "train_autoencoders": "koopman.train_encoders with the loss reconstruction",
    "train_classifiers": "koopman.train_encoders with the loss classes",
    "trainstate": "dissociation.training.make_step and fit, whose result has `state`",
    "vamp": "koopman.fit with ReducedRank; koopman.vamp_score",
    "vampnet": "koopman.train_encoders with the loss vamp_loss",
    "vampnets": "koopman.train_encoders with the loss vamp_loss",
    "verify": "dissociation.rewrites.certify",
    "weight_matching": "dissociation.rewrites.match_weights",
}
"""Place of what peers call by other names, in lower case."""


@functools.cache
def exports() -> dict[str, tuple[str, ...]]:
    """Return the public names of each package and folder, without an import of them."""
    names_of_folder = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        root = Path(spec.origin).parent
        for file in [root / "__init__.py", *sorted(root.glob("[!_]*/__init__.py"))]:
            folder = ".".join([package, *file.parent.relative_to(root).parts])
            names = _listed(file)
            if names:
                names_of_folder[folder] = names
    return names_of_folder


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
        names = exports().get(folder, ())
        matches = difflib.get_close_matches(name, names, 1, 0.85)
        if matches:
            return f"Perhaps {folder}.{matches[0]}"
    return None
