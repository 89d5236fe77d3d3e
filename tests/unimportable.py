"""A module for test_rank_pool.py that can be imported in pytest's process only, like a test whose import fails on the
ranks.
"""

import multiprocessing

if multiprocessing.parent_process() is not None:
    raise ImportError("this module does not import on a rank")


def never_runs() -> None:
    """Do nothing. A test asks the ranks to run this function, which they cannot import."""
