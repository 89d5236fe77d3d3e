"""The settings of every test, and the pool of rank processes."""

import gc
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.rank_pool import RankPool, fill_uninitialized_memory
from tests.sampling import spread
from tests.simulated_gpu.ranks import SimulatedRanks

# Draw the same examples until the code changes (hypothesis takes constants from it), so that a failure in CI is a
# failure here. The long run draws a few thousand new ones. A failure that it finds becomes a line of FOUND in
# tests/attention/test_exactness.py.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=10)
hypothesis.settings.register_profile("long", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("ci")

fill_uninitialized_memory()
# The ranks also have one thread, because models as small as these would only wait for a second one.
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # Run before pytest selects by markers.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use the rank pool as ``ranks``, and cases that a sample leaves out as ``long``."""
    samples: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and {"rank_pool", "gpu_ranks"} & set(item.fixturenames):
            item.add_marker("ranks")
        is_sampled = item.get_closest_marker("sample") and not item.get_closest_marker("long")
        if isinstance(item, pytest.Function) and is_sampled:
            samples.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for function, cases in samples.items():
        (count,) = cases[0].get_closest_marker("sample").args
        chosen = spread([case.callspec.indices for case in cases], count, seed=function)
        for index, case in enumerate(cases):
            if index not in chosen:
                case.add_marker("long")


def pytest_collection_finish() -> None:
    """Exclude modules and tests from garbage collection: walking them took a tenth of the time of a test."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_unconfigure() -> None:
    # Frozen objects outlive the interpreter, and nanobind would report these as leaks.
    gc.unfreeze()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Yield rank processes, kept for the whole run: ``rank_pool.run(fn, world_size, ...)``."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[SimulatedRanks]:
    """Yield ranks with a simulated GPU each: ``gpu_ranks.run(fn, world_size, ...)``."""
    pool = RankPool()
    yield SimulatedRanks(pool)
    pool.close()
