"""Strict settings for every test: four virtual CPU devices, no silent rank promotion, a clear random state.

They run on the CPU also where there is a GPU, of which two workers would each take most of the
memory. On a GPU: `JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false python -m pytest`.
"""

import gc
import os
from importlib.metadata import version
from pathlib import Path

import program_cache

# Most of the time of these tests is compiling of small programs. With little optimisation, and by
# XLA's older emitters, it takes half of that. Without most optimisations it takes a third less
# again, but equal sums may be contracted unequally and lose equal bits (see `OPTIMISED`).
# Benchmarks run as users do. A version without a flag would end the process.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=1"
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10."),
)
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if (
    os.environ["JAX_PLATFORMS"] != "cpu"
):  # a GPU multiplies float32 as TF32 unless told; tests compare formulas
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "float32")
# As `use_all_cores` has them: decompositions on several devices.
os.environ.setdefault("PJRT_NPROC", "8")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Compiled programs are cached for other modules, processes and runs, unless the user names a
# folder.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(program_cache.folder()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import cpu_seconds
import jax
import jaxtyping
import matplotlib as mpl
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

OPTIMISED = {"test_learn.py", "test_resuming.py", "test_training.py"}
"""Modules of tests that compare the bits of two programs."""
LONGEST = """
    notebooks/test_notebooks dissociation/test_rewrites dissociation/test_figures
    dissociation/test_canonical dissociation/test_similarity_pairs tests/test_docs tests/test_keys
    dissociation/test_similarity koopman/test_operators dissociation/test_nearest_information dissociation/test_linear
    tests/test_protocol dissociation/test_executor koopman/test_derivatives koopman/test_learn koopman/test_figures
    dissociation/test_collapse_figure dissociation/test_network_matching dissociation/test_growth koopman/test_nystroem
    koopman/test_losses dissociation/test_planting dissociation/test_training tests/test_docs_recipes
"""
"""Modules of tests, with their folder, in the order of their measured CPU seconds with all marks."""

mpl.use("Agg")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    # Tests in float32 pass NumPy's float64 on purpose; the warning of it has a test of its own.
    config.addinivalue_line("filterwarnings", "ignore:Data in float64 are computed in float32")
    cpu_seconds.register(config)


def pytest_sessionfinish(session):
    is_worker = hasattr(session.config, "workerinput")
    if not is_worker and os.environ["JAX_COMPILATION_CACHE_DIR"] == str(program_cache.folder()):
        program_cache.trim(program_cache.root())


def pytest_collection_modifyitems(items):
    """The longest first: workers take modules in this order, and one alone with a long one leaves the others idle."""
    rank = {name: index for index, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: rank.get(f"{item.path.parent.name}/{item.path.stem}", len(rank)))
    if jax.default_backend() != "cpu":
        for item in items:
            if item.get_closest_marker("cpu"):
                item.add_marker(pytest.mark.skip("how a CPU computes"))


@pytest.fixture
def key():
    return jax.random.key(20)


@pytest.fixture(autouse=True)
def _own_compilation_cache():
    """The command line chooses a cache for its process; a test of it must not do so for others."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    yield
    if before != {name: jax.config.values[name] for name in names}:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture
def x64():
    """Compute in float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def precision(dtype):
    """Compute in float64 where the test's parameter `dtype` is that."""
    with jax.enable_x64(np.dtype(dtype) == np.float64):
        yield


@pytest.fixture
def unchecked():
    """As users run it: our own errors, not the type checker's."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def drawn_by_numpy():
    """For models and inputs of many shapes; not where the draws themselves are compared."""
    from zoo import numpy_draws  # imports what is checked by the plugin, which comes later

    with numpy_draws():
        yield


@pytest.fixture(autouse=True, scope="module")
def _compiler(request):
    """Optimise programs only where two of them are to give equal bits; the time of the other tests is compiling."""
    least = request.path.name not in OPTIMISED
    if jax.config.values["jax_disable_most_optimizations"] != least:
        jax.clear_caches()  # JAX does not tell programs by this setting
        jax.config.update("jax_disable_most_optimizations", least)


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    # Every compiled program holds memory maps, of which Linux allows 65 530 by default: one process
    # of all tests would run out of them, and crash inside the compiler. Until then modules share
    # programs, lowered once.
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
    gc.collect()
