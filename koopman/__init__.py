"""Learn evolution operators (Koopman, transfer) from trajectories, in pure JAX.

Apart from the folders `datasets` and `figures`, all names are here, for example `from koopman
import fit, Ridge`.
"""

from typing import TYPE_CHECKING

from dissociation._core.lazy import attach

__all__ = [
    "lagged_pairs", "delay_embed", "Moments", "moments", "merge_moments", "scan_moments", "fit",
    "diagnose", "Ridge", "PrincipalComponents", "ReducedRank", "Operator", "Linear", "RBF",
    "Laplacian", "Matern", "Polynomial", "median_distance", "nystroem_map", "choose_centres",
    "eigenvalues", "decompose", "right_eigenfunctions", "left_eigenfunctions", "modes",
    "singular_values", "eigenpairs", "predict", "matrix_powers", "risk", "score", "fit_generator",
    "transition_matrix", "dynamical_distance", "pairwise_dynamical_distance", "align_dynamics",
    "eigenvalue_distance", "train_encoders", "encode", "validation_loss", "FeatureMap",
    "Autoencoder", "vamp_loss", "vamp_score", "dpnets_loss", "spectral_contrastive_loss",
    "autoencoder_loss", "energy_loss", "orthonormal_fro_reg", "orthonormal_logfro_reg",
    "fit_model", "KoopmanModel", "load_model", "fit_exponentials", "Exponentials", "plot_lags",
    "scan_lags", "plot_model",
]  # fmt: skip

if TYPE_CHECKING:
    from koopman._encoders._learn import encode, train_encoders, validation_loss
    from koopman._encoders._losses import (
        autoencoder_loss,
        dpnets_loss,
        energy_loss,
        orthonormal_fro_reg,
        orthonormal_logfro_reg,
        spectral_contrastive_loss,
        vamp_loss,
        vamp_score,
    )
    from koopman._encoders._networks import Autoencoder, FeatureMap
    from koopman._models._drawing import plot_lags, plot_model
    from koopman._models._exponentials import Exponentials, fit_exponentials
    from koopman._models._lags import scan_lags
    from koopman._models._model import KoopmanModel, fit_model, load_model
    from koopman._operators._diagnose import diagnose
    from koopman._operators._dynamical_similarity import (
        align_dynamics,
        dynamical_distance,
        eigenvalue_distance,
        pairwise_dynamical_distance,
        transition_matrix,
    )
    from koopman._operators._estimators import PrincipalComponents, ReducedRank, Ridge
    from koopman._operators._fit import fit
    from koopman._operators._forecast import matrix_powers, predict, risk, score
    from koopman._operators._generator import fit_generator
    from koopman._operators._kernels import (
        RBF,
        Laplacian,
        Linear,
        Matern,
        Polynomial,
        choose_centres,
        median_distance,
        nystroem_map,
    )
    from koopman._operators._operator import Operator
    from koopman._operators._pairs import (
        Moments,
        delay_embed,
        lagged_pairs,
        merge_moments,
        moments,
        scan_moments,
    )
    from koopman._operators._spectrum import (
        decompose,
        eigenpairs,
        eigenvalues,
        left_eigenfunctions,
        modes,
        right_eigenfunctions,
        singular_values,
    )

    __version__: str
else:
    __getattr__, __dir__ = attach(__name__)
