"""Import the modules that ranks need once: tests/rank_pool.py forks all ranks from a process that has imported this
file.

A module that cannot be imported is skipped, and the rank whose job needs it raises the error.
"""

import contextlib
import gc
import importlib
import warnings

import torch

# tests.tiny and zoo.tiny.pipelines import most of the models and pipelines that the tests build.
_MODULES = (
    *("torch.testing", "torch.distributed.device_mesh", "torch.distributed.tensor.debug"),
    *("torch._dynamo", "torch._inductor.compile_fx", "diffusers", "transformers"),
    *("para_core.adapters.api", "tests.tiny", "zoo.tiny.pipelines"),
)

torch.set_num_threads(1)  # A fork would inherit the locks of the other threads, but not the threads.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _name in _MODULES:
        with contextlib.suppress(Exception):
            importlib.import_module(_name)
    # Stand-ins of libraries (tests/attention/fake_libraries.py) leave sys.modules with what a rank imported meanwhile.
    with contextlib.suppress(Exception):
        importlib.import_module("para_core.adapters.weights.features").features()
    # The first compilation builds tables that all later ones use, which would cost each new rank 1.5 s. Compile the
    # forward only, because a backward pass starts threads, which a fork loses.
    with contextlib.suppress(Exception), torch.no_grad():
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # tqdm's monitor is a thread too.
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.LayerNorm(4))
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(2, 4))
        torch.compiler.reset()
# The garbage collector of a rank would walk all of this repeatedly, and copy its pages.
gc.collect()
gc.freeze()
gc.set_threshold(10_000, 20, 20)
