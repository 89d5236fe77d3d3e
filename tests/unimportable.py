"""For test_rank_pool.py: imports in pytest's process and in no other, as a test does whose import is broken on the
ranks.
"""

import multiprocessing

if multiprocessing.parent_process() is not None:
    raise ImportError("this module does not import on a rank")


def never_runs() -> None:
    """The function that the ranks are asked for."""
