"""Simulate trajectories as pure functions of a key, and compute exact spectra of operators."""

from typing import TYPE_CHECKING

from dissociation._core.lazy import attach

__all__ = [
    "ExactSpectrum", "logistic_map", "logistic_features", "logistic_spectrum", "linear_system",
    "linear_spectrum", "regime_switching_var", "regime_switching_spectrum", "ornstein_uhlenbeck",
    "ornstein_uhlenbeck_spectrum", "duffing", "lorenz63", "overdamped_langevin",
    "langevin_spectrum", "prinz_langevin", "prinz_spectrum", "ordered_mnist", "OrderedDigits",
    "cycle_spectrum",
]  # fmt: skip

if TYPE_CHECKING:
    from koopman.datasets._langevin import (
        langevin_spectrum,
        overdamped_langevin,
        prinz_langevin,
        prinz_spectrum,
    )
    from koopman.datasets._linear import (
        linear_spectrum,
        linear_system,
        regime_switching_spectrum,
        regime_switching_var,
    )
    from koopman.datasets._maps import logistic_features, logistic_map, logistic_spectrum
    from koopman.datasets._ordered_mnist import OrderedDigits, cycle_spectrum, ordered_mnist
    from koopman.datasets._spectrum_type import ExactSpectrum
    from koopman.datasets._systems import (
        duffing,
        lorenz63,
        ornstein_uhlenbeck,
        ornstein_uhlenbeck_spectrum,
    )
else:
    __getattr__, __dir__ = attach(__name__)
