"""Evolution operators (Koopman, transfer) learned from trajectories, in pure JAX.

The names that are needed most are here, as `from koopman import fit, Ridge`; a module is imported when a name of it is
first asked for.
"""

from typing import TYPE_CHECKING

from dissociation.lazy import attach

if TYPE_CHECKING:  # what type checkers and editors see, the same names as below
    from koopman.estimators import PrincipalComponents as PrincipalComponents
    from koopman.estimators import ReducedRank as ReducedRank
    from koopman.estimators import Ridge as Ridge
    from koopman.forecast import predict as predict
    from koopman.forecast import risk as risk
    from koopman.forecast import score as score
    from koopman.generator import fit_generator as fit_generator
    from koopman.kernels import RBF as RBF
    from koopman.kernels import Laplacian as Laplacian
    from koopman.kernels import Matern as Matern
    from koopman.kernels import Polynomial as Polynomial
    from koopman.learn import encode as encode
    from koopman.learn import train_autoencoders as train_autoencoders
    from koopman.learn import train_encoders as train_encoders
    from koopman.operator import Operator as Operator
    from koopman.operators import fit as fit
    from koopman.pairs import Moments as Moments
    from koopman.pairs import delay_embed as delay_embed
    from koopman.pairs import lagged_pairs as lagged_pairs
    from koopman.pairs import merge_moments as merge_moments
    from koopman.pairs import moments as moments
    from koopman.pairs import scan_moments as scan_moments
    from koopman.spectrum import decompose as decompose
    from koopman.spectrum import eigenvalues as eigenvalues
    from koopman.spectrum import modes as modes
    from koopman.spectrum import singular_values as singular_values

    __version__: str
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "koopman.estimators": ("PrincipalComponents", "ReducedRank", "Ridge"),
            "koopman.forecast": ("predict", "risk", "score"),
            "koopman.generator": ("fit_generator",),
            "koopman.kernels": ("RBF", "Laplacian", "Matern", "Polynomial"),
            "koopman.learn": ("encode", "train_autoencoders", "train_encoders"),
            "koopman.operator": ("Operator",),
            "koopman.operators": ("fit",),
            "koopman.pairs": ("Moments", "delay_embed", "lagged_pairs", "merge_moments", "moments", "scan_moments"),
            "koopman.spectrum": ("decompose", "eigenvalues", "modes", "singular_values"),
        },
    )
