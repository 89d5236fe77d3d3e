"""Exact attention imports no approximate module before an option needs one."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import para_core

ATTENTION = Path(para_core.__file__).parent / "attention"
APPROXIMATE = "para_core.attention.approximate"

CALL = f"""
import sys
import torch, torch.nn.functional as F
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from para_core import SparseKVAttnMode, UnifiedAttnMode, init_context_parallel_mesh
from para_core.attention.attention_options import AttnOptions
from para_core.dataclass_json import from_json, to_json
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=2)
q = torch.randn(1, 4, 8, 16, requires_grad=True)
rounded, kept = {{"comm_dtype": torch.int8}}, {{"share": 0.5}}
for mode, options in ((UnifiedAttnMode, {{}}), (UnifiedAttnMode, rounded), (SparseKVAttnMode, kept)):
    with mode(mesh, assume_equal=True, **options):
        with torch.no_grad():
            F.scaled_dot_product_attention(q, q, q, torch.ones(1, 1, 1, 32, dtype=torch.bool))
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    from_json(AttnOptions, to_json(AttnOptions(**rounded)))
    print(sum(name.startswith("{APPROXIMATE}") for name in sys.modules))
"""


@pytest.mark.slow
def test_an_exact_call_loads_no_approximate_module():
    run = subprocess.run([sys.executable, "-c", CALL], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    after_exact, after_rounded, after_kept_keys = map(int, run.stdout.split())
    assert after_exact == after_rounded == 0 < after_kept_keys


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_exact_modules_import_no_approximate_one():
    modules = sorted(ATTENTION.glob("*.py"))
    assert len(modules) > 20
    naming = [path.name for path in modules if any(name.startswith(APPROXIMATE) for name in imported_modules(path))]
    assert naming == []
