"""What a module must provide to be a figure of a command line."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:  # The list of figures is read before anything slow is imported.
    from os import PathLike

    import matplotlib.figure
    import numpy as np
    from jax import Array

    from dissociation.training._progress import MeterFactory


@runtime_checkable
class Settings(Protocol):
    """A figure's options: a frozen dataclass that checks itself when made; the string below a field is its help."""

    def quick(self) -> "Settings":
        """A small run that shows that everything works."""
        ...


@runtime_checkable
class Measured(Protocol):
    """A figure's results, a named tuple: all that is drawn and told of, and wall times of its parts."""

    @property
    def seconds(self) -> dict[str, float]: ...  # noqa: D102


@runtime_checkable
class Figure(Protocol):
    """A module, which `figures()` of its package lists.

    It may have more: `families(results)`, see `_labels.families_of`; `UNITS`, of arrays by how their names begin; and
    its results a `member`, one of the networks, which the report shows.

    Attributes:
        STEM: The name of the files.
        SHOWS: What the figure shows, in a sentence: the help of its command.
        AXES: What the axes of the saved arrays are, by how the arrays' names begin.
        Config: The class of its options, which stands in the module itself.
    """

    @property
    def STEM(self) -> str: ...  # noqa: D102, N802

    @property
    def SHOWS(self) -> str: ...  # noqa: D102, N802

    @property
    def AXES(self) -> Mapping[str, tuple[str, ...]]: ...  # noqa: D102, N802

    @property
    def Config(self) -> Callable[..., Settings]: ...  # noqa: D102, N802

    def source(self, config: Any) -> Any:
        """What is computed on, loaded; its contents are part of a run's identity. Raises if an option does not fit."""
        ...

    def compute(
        self,
        config: Any,
        *,
        key: "Array",
        dataset: Any = None,
        folder: "str | PathLike[str] | None" = None,
        progress: "str | MeterFactory | None" = None,
    ) -> Measured:
        """All of the work, with the statistics that are drawn.

        Args:
            config: What to do.
            key: Everything random follows from it.
            dataset: In place of what `source` gives.
            folder: Where finished parts are kept; a second call with the same arguments goes on from there.
            progress: See `dissociation.training`.

        Raises:
            RefusedFile: If `folder` holds parts of another run, or broken ones.
            WrongValue: If an option does not fit the data, or all networks diverged.
        """
        ...

    def draw(self, results: Any) -> "matplotlib.figure.Figure":
        """The figure of what `compute` returned: draws, and computes nothing."""
        ...

    def arrays(self, results: Any) -> "dict[str, np.ndarray]":
        """The arrays of the figure under flat names, for an `.npz` file."""
        ...

    def describe(self, results: Any) -> dict[str, Any]:
        """Return the settings and numbers for the JSON beside the figure."""
        ...

    def caption(self, results: Any) -> str:
        """What stands below the figure, in two to six sentences, with numbers from the results.

        Panel by panel (a, b, ...) what is shown; of how many members, samples and which data; what lines and bands are.
        """
        ...

    def headline(self, results: Any) -> str:
        """Return a line that names the data and the size of the run."""
        ...

    def table(self, results: Any) -> list[list[str]]:
        """A header and rows of cells."""
        ...
