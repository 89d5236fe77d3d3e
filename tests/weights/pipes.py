"""Tiny pipelines with their own text encoders, because sharding shared ones would shard them for other tests too."""

import copy
import warnings

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.tiny import flux_call, flux_pipe
from zoo.tiny.pipelines import PIPELINES


def make(name):
    if name == "flux":
        return flux_pipe(shared_parts=False)
    pipe = PIPELINES[name].build()
    for part, module in pipe.components.items():
        if part.startswith("text_encoder") and isinstance(module, nn.Module):
            setattr(pipe, part, copy.deepcopy(module))
    return pipe


def generate(pipe, name, **options):
    """Return the first output as a tensor."""
    with warnings.catch_warnings():
        # Mochi asks for an autocast that the CPU does not have.
        warnings.filterwarnings("ignore", message="In CPU autocast")
        call = flux_call(**options) if name == "flux" else PIPELINES[name].call(**options)
        out = pipe(**call)[0]
    return out if isinstance(out, Tensor) else torch.as_tensor(np.asarray(out).astype(np.float64))


def bytes_of(*modules):
    """Return the bytes of parameters that this rank holds."""
    held = [x.to_local() if isinstance(x, DTensor) else x for module in modules for x in module.parameters()]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}.values())
