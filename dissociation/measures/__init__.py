"""Measure networks and their representations, one network or array at a time."""

from typing import TYPE_CHECKING

from dissociation._core.lazy import attach

__all__ = [
    "error_rate", "input_noise_error", "parameter_noise_error", "linear_probe",
    "linear_probe_fit", "gradient_probe", "transfer_errors", "class_moments", "merge_moments",
    "neural_collapse", "ClassMoments", "Collapse", "linear_head", "first_cross",
    "median_crossing", "log_slope", "information_plane", "information", "label_information",
    "entropy", "entropy_weights", "smoothed_information", "whiten",
]  # fmt: skip

if TYPE_CHECKING:
    from dissociation.measures._collapse import (
        ClassMoments,
        Collapse,
        class_moments,
        merge_moments,
        neural_collapse,
    )
    from dissociation.measures._coordinates import whiten
    from dissociation.measures._crossing import first_cross, log_slope, median_crossing
    from dissociation.measures._hsic import information_plane
    from dissociation.measures._margins import linear_head
    from dissociation.measures._nearest import (
        entropy,
        entropy_weights,
        information,
        label_information,
    )
    from dissociation.measures._probes import (
        gradient_probe,
        linear_probe,
        linear_probe_fit,
        transfer_errors,
    )
    from dissociation.measures._robustness import (
        error_rate,
        input_noise_error,
        parameter_noise_error,
    )
    from dissociation.measures._smoothed import smoothed_information
else:
    __getattr__, __dir__ = attach(__name__)
