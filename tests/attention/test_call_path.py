"""The path of one eager attention call from the mode to its result: files of para_core, and calls in Python."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import para_core
from para_core import UnifiedAttnMode
from tests.attention.cases import make_mesh

ROOT = Path(para_core.__file__).parent

# A reader who follows one call opens these files. docs/how_it_works.md walks through them.
MOST_FILES = {"ulysses": 7, "ring": 11}
# Python 3.11, which counts comprehensions as calls, needs 67 and 81, and some more after other tests in the same
# process. Before calls were bound once it needed 105 and 129.
MOST_PYTHON_CALLS = {"ulysses": 78, "ring": 92}


def trace_call(kind, assume_equal):
    """Return the files of para_core in which a call runs, and its number of Python calls, after two calls like it."""
    files, num_calls = set(), 0

    def note(frame, event, _):
        nonlocal num_calls
        if event == "call":
            num_calls += 1
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT):
                files.add(str(path.relative_to(ROOT)))

    mesh = make_mesh(2, 1) if kind == "ring" else make_mesh(1, 2)
    with torch.no_grad(), UnifiedAttnMode(mesh, assume_equal=assume_equal) as cp:
        q = cp.shard(torch.randn(1, 4, 16, 8, generator=torch.Generator().manual_seed(0)), dim=2)
        for _ in range(2):
            F.scaled_dot_product_attention(q, q, q)
        sys.setprofile(note)
        try:
            F.scaled_dot_product_attention(q, q, q)
        finally:
            sys.setprofile(None)
    return sorted(files), num_calls


@pytest.mark.parametrize(("kind", "assume_equal"), [("ulysses", False), ("ring", False), ("ring", True)])
def test_a_call_passes_few_files_and_python_calls(rank_pool, kind, assume_equal):
    for files, num_calls in rank_pool.run(trace_call, 2, kind, assume_equal):
        assert "modes/unified.py" in files and "attention/mesh_attention.py" in files
        assert len(files) <= MOST_FILES[kind] - assume_equal, files
        assert num_calls <= MOST_PYTHON_CALLS[kind]
        assert ("distributed/agree.py" in files) == (not assume_equal)
