"""A module whose import changes torch and the process in each of the ways that observe_import.py detects."""

import atexit
import logging
import os
import sys
import warnings

import torch
import torch.distributed.distributed_c10d as c10d

c10d._hash_ranks_to_str = lambda ranks: "name"
torch.nn.Linear.forward = lambda self, x: x
torch.nn.Conv1d.__name__ = "Convolution"
_libraries = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_libraries[0].fallback(torch.library.fallthrough_kernel, "TESTING_ONLY_GenericMode")
_libraries[1].impl("scaled_dot_product_attention", lambda *args: args[0], "TESTING_ONLY_GenericMode")
torch.set_default_dtype(torch.float64)
warnings.filterwarnings("ignore", message="of the module")
logging.getLogger("torch").setLevel(7)
atexit.register(len, [])
os.environ["PARA_CORE_TEST"] = "1"
sys.excepthook = lambda *raised: None
