"""Walk the exact solutions of linear networks: tasks, families, noise, depth, flow and planting."""

from typing import TYPE_CHECKING

from dissociation._core.lazy import attach

__all__ = [
    "make_task", "random_task", "teacher_task", "hierarchy_task", "complete_tree", "Task",
    "LinearNetwork", "FAMILIES", "GLS", "LSS", "MRNS", "MWNS", "Family", "Residual", "placement",
    "Placement", "Noise", "expected_loss", "simulated_loss", "SimulatedLoss", "noise_minimiser",
    "least_loss", "fresh_loss", "second_readout_loss", "least_norm", "least_norm_network",
    "deep_residual", "balanced_network", "gradient_flow", "Flow", "plurality", "Plurality", "plant",
    "plant_rsm", "Planted",
]  # fmt: skip

if TYPE_CHECKING:
    from dissociation.linear._dynamics import Flow, balanced_network, gradient_flow
    from dissociation.linear._families import (
        FAMILIES,
        GLS,
        LSS,
        MRNS,
        MWNS,
        Family,
        LinearNetwork,
        Placement,
        Residual,
        deep_residual,
        least_norm,
        least_norm_network,
        placement,
    )
    from dissociation.linear._noise import (
        Noise,
        SimulatedLoss,
        expected_loss,
        fresh_loss,
        least_loss,
        noise_minimiser,
        second_readout_loss,
        simulated_loss,
    )
    from dissociation.linear._planting import Planted, plant, plant_rsm
    from dissociation.linear._plurality import Plurality, plurality
    from dissociation.linear._tasks import (
        Task,
        complete_tree,
        hierarchy_task,
        make_task,
        random_task,
        teacher_task,
    )
else:
    __getattr__, __dir__ = attach(__name__)
