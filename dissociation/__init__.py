"""What a network's function says about its representation, and what it leaves open.

Train many seeds of a network, rewrite its weights without changing its function, and measure what changes.
The names that are needed most are here, for example `from dissociation import load, fit_mnist, neuron_groups, scale`:
a module is imported when a name of it is first asked for. All others are imported from their modules.
"""

from typing import TYPE_CHECKING

from dissociation.lazy import attach

if TYPE_CHECKING:  # what type checkers and editors see, the same names as below
    from dissociation.cores import use_all_cores as use_all_cores
    from dissociation.data.datasets import Dataset as Dataset
    from dissociation.data.datasets import load as load
    from dissociation.display import show as show
    from dissociation.members import map_members as map_members
    from dissociation.members import member as member
    from dissociation.metrics.collapse import class_moments as class_moments
    from dissociation.metrics.collapse import neural_collapse as neural_collapse
    from dissociation.metrics.probes import crossval_softmax_predict as crossval_softmax_predict
    from dissociation.metrics.robustness import error_rate as error_rate
    from dissociation.metrics.robustness import input_noise_error as input_noise_error
    from dissociation.metrics.robustness import parameter_noise_error as parameter_noise_error
    from dissociation.metrics.similarity import compare as compare
    from dissociation.metrics.similarity import pairwise as pairwise
    from dissociation.metrics.transfer import transfer_errors as transfer_errors
    from dissociation.models.representations import member_representations as member_representations
    from dissociation.models.representations import representations as representations
    from dissociation.recipes.mnist import fit_mnist as fit_mnist
    from dissociation.sweeps import Grid as Grid
    from dissociation.symmetry.bounds import similarity_bounds as similarity_bounds
    from dissociation.symmetry.freedom import cka_freedom as cka_freedom
    from dissociation.symmetry.matching import barrier as barrier
    from dissociation.symmetry.matching import match_activations as match_activations
    from dissociation.symmetry.matching import match_weights as match_weights
    from dissociation.training import Epochs as Epochs
    from dissociation.training import FitResult as FitResult
    from dissociation.training import FullBatch as FullBatch
    from dissociation.training import Layout as Layout
    from dissociation.training import Save as Save
    from dissociation.training import fit as fit
    from dissociation.training import make_step as make_step
    from dissociation.training import train as train
    from dissociation.weights.certificate import Certificate as Certificate
    from dissociation.weights.certificate import certify as certify
    from dissociation.weights.groups import NeuronGroup as NeuronGroup
    from dissociation.weights.groups import group_report as group_report
    from dissociation.weights.groups import neuron_groups as neuron_groups
    from dissociation.weights.growth import add_nuisance as add_nuisance
    from dissociation.weights.growth import add_phantom as add_phantom
    from dissociation.weights.growth import duplicate as duplicate
    from dissociation.weights.noise import add_parameter_noise as add_parameter_noise
    from dissociation.weights.noise import parameter_noise as parameter_noise
    from dissociation.weights.rewrites import check_groups as check_groups
    from dissociation.weights.rewrites import compose as compose
    from dissociation.weights.rewrites import null_perturb as null_perturb
    from dissociation.weights.rewrites import null_space as null_space
    from dissociation.weights.rewrites import permute as permute
    from dissociation.weights.rewrites import rotate as rotate
    from dissociation.weights.rewrites import scale as scale
    from dissociation.weights.seen import layer_inputs as layer_inputs

    __version__: str
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "dissociation.cores": ("use_all_cores",),
            "dissociation.data.datasets": ("Dataset", "load"),
            "dissociation.display": ("show",),
            "dissociation.members": ("map_members", "member"),
            "dissociation.metrics.collapse": ("class_moments", "neural_collapse"),
            "dissociation.metrics.probes": ("crossval_softmax_predict",),
            "dissociation.metrics.robustness": ("error_rate", "input_noise_error", "parameter_noise_error"),
            "dissociation.metrics.similarity": ("compare", "pairwise"),
            "dissociation.metrics.transfer": ("transfer_errors",),
            "dissociation.models.representations": ("member_representations", "representations"),
            "dissociation.recipes.mnist": ("fit_mnist",),
            "dissociation.sweeps": ("Grid",),
            "dissociation.symmetry.bounds": ("similarity_bounds",),
            "dissociation.symmetry.freedom": ("cka_freedom",),
            "dissociation.symmetry.matching": ("barrier", "match_activations", "match_weights"),
            "dissociation.training": (
                "Epochs",
                "FitResult",
                "FullBatch",
                "Layout",
                "Save",
                "fit",
                "make_step",
                "train",
            ),
            "dissociation.weights.certificate": ("Certificate", "certify"),
            "dissociation.weights.groups": ("NeuronGroup", "group_report", "neuron_groups"),
            "dissociation.weights.growth": ("add_nuisance", "add_phantom", "duplicate"),
            "dissociation.weights.noise": ("add_parameter_noise", "parameter_noise"),
            "dissociation.weights.rewrites": (
                "check_groups",
                "compose",
                "null_perturb",
                "null_space",
                "permute",
                "rotate",
                "scale",
            ),
            "dissociation.weights.seen": ("layer_inputs",),
        },
    )
