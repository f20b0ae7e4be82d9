"""Protocol of modules that are figures of a command line."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:  # The list of figures is read before anything slow is imported.
    from os import PathLike

    import matplotlib.figure
    from jax import Array

    from dissociation.training._progress import MeterFactory


@runtime_checkable
class Settings(Protocol):
    """Options of a figure: a frozen dataclass that checks itself; docstrings of fields are help texts."""

    def quick(self) -> "Settings":
        """Return the options of a smoke run."""
        ...


@runtime_checkable
class Figure(Protocol):
    """Module of a figure, listed by `figures()` of its package.

    It may have `UNITS`, units of arrays by the beginnings of names, and `families(results)`, by array and axis the ends
    of names that are not keys in `arrays`. Its results have `seconds`, the wall times of parts, and may have a
    `member`, one of the networks, which the report shows.

    Attributes:
        STEM: Name of the files.
        SHOWS: Purpose of the figure in a sentence, the help of its command.
        AXES: Axes of the arrays by the beginnings of names; keys of dictionaries come first.
        Config: Class of the options, defined in the module itself.
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
        """Load the data, whose contents belong to the identity of a run; raise if an option does not fit."""
        ...

    def compute(
        self,
        config: Any,
        *,
        key: "Array",
        dataset: Any = None,
        folder: "str | PathLike[str] | None" = None,
        progress: "str | MeterFactory | None" = None,
    ) -> Any:
        """Compute all arrays and the drawn statistics.

        Args:
            config: Options.
            key: Key of all randomness.
            dataset: Data in place of those of `source`.
            folder: Folder of finished parts, from which a second call with the same arguments resumes.
            progress: Meter, see `open_meter`.

        Raises:
            RefusedFile: If `folder` holds parts of another run, or broken ones.
            WrongValue: If an option does not fit the data, or all networks diverged.
        """
        ...

    def draw(self, results: Any) -> "matplotlib.figure.Figure":
        """Draw the value of `compute` without further computation."""
        ...

    def arrays(self, results: Any) -> dict[str, Any]:
        """Return arrays by name, or nested dictionaries of them, whose keys end the arrays' names in an `.npz` file."""
        ...

    def describe(self, results: Any) -> dict[str, Any]:
        """Return settings and numbers for the JSON beside the figure."""
        ...

    def caption(self, results: Any) -> str:
        """Return a caption of two to six sentences, with numbers from the results.

        Panel by panel (a, b, ...): content, numbers of members and samples, data, meaning of lines and bands.
        """
        ...

    def headline(self, results: Any) -> str:
        """Return a line with the data and the size of the run."""
        ...

    def table(self, results: Any) -> list[list[str]]:
        """Return a header and rows of cells."""
        ...
