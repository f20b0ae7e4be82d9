"""Protocol of modules that are figures of a command line."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:  # The list of figures is read before anything slow is imported.
    import matplotlib.figure
    import xarray
    from jax import Array

    from dissociation.figures._cache import AnyMeter, CacheFolder


@runtime_checkable
class Settings(Protocol):
    """Options of a figure: a frozen dataclass that checks itself. Its fields' docstrings are help texts."""

    def quick(self) -> "Settings":
        """Return the options of a smoke run."""
        ...


@runtime_checkable
class Figure(Protocol):
    """Module of a figure, listed by `figures()` of its package.

    Attributes:
        STEM: Name of the files.
        SHOWS: Purpose of the figure in a sentence, the help of its command.
        Config: Class of the options, defined in the module.
    """

    @property
    def STEM(self) -> str: ...  # noqa: D102, N802

    @property
    def SHOWS(self) -> str: ...  # noqa: D102, N802

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
        data: Any = None,
        cache: "CacheFolder" = None,
        progress: "AnyMeter" = None,
    ) -> "xarray.Dataset":
        """Compute the dataset of the figure, with coordinates, units, and the configuration as JSON attribute `config`.

        Args:
            config: Options.
            key: Key of all randomness.
            data: Data in place of those of `source`.
            cache: Folder of cached arrays, from which a second call with the same arguments resumes.
            progress: Meter: "auto", "terminal", a function that opens one, or None.

        Raises:
            RefusedFile: If `cache` holds arrays of another run, or broken ones.
            WrongValue: If an option does not fit the data, or all networks diverged.
        """
        ...

    def draw(self, dataset: "xarray.Dataset") -> "matplotlib.figure.Figure":
        """Draw the value of `compute`, or of `load_results`, without further measurements."""
        ...

    def caption(self, dataset: "xarray.Dataset") -> str:
        """Return a caption of two to six sentences, with numbers from the dataset.

        Panel by panel (a, b, ...): content, numbers of members and samples, data, meaning of lines and bands.
        """
        ...

    def headline(self, dataset: "xarray.Dataset") -> str:
        """Return a line with the data and the size of the run."""
        ...

    def table(self, dataset: "xarray.Dataset") -> list[list[str]]:
        """Return a header and rows of cells."""
        ...
