"""What ranks need, imported once: the process that tests/rank_pool.py forks them from imports this file.

Whatever cannot be imported is left to the rank whose job needs it, and to the error that it gets there.
"""

import contextlib
import gc
import importlib
import warnings

import torch

# tests.tiny and zoo.tiny.pipelines.registry import most of the models and pipelines that the tests build.
_MODULES = (
    "torch.testing",
    "torch.distributed.device_mesh",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "diffusers",
    "transformers",
    "para_core.adapters",
    "tests.tiny",
    "zoo.tiny.pipelines.registry",
)

torch.set_num_threads(1)  # a fork would inherit the locks of the other threads, not the threads
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _name in _MODULES:
        with contextlib.suppress(Exception):
            importlib.import_module(_name)
# What stays for good is not walked by each rank's garbage collector, which would copy its pages.
gc.freeze()
