"""Tiny pipelines with their own text encoders, because sharding shared ones would shard them for other tests too."""

import copy
import warnings

import numpy as np
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from para_core import init_context_parallel_mesh
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


def load_whole(cls, folder, dtype=None):
    """Load all weights, in memory of their own: weights in a file are not aligned, so kernels sum in another order."""
    pipe = cls.from_pretrained(folder, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    for module in (pipe.transformer, pipe.text_encoder, pipe.text_encoder_2):
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
    return pipe


def mesh_of(dims):
    """Return a mesh of all ranks with these sizes by dim."""
    return init_context_parallel_mesh("cpu", **{f"max_{name}_dim_size": size for name, size in dims.items()})


# The mesh and the options of each way to split the weights over two ranks.
METHODS = {
    "fsdp": ({}, {"weights": "fsdp"}),
    "tensor": ({"tensor": 2}, {"weights": "tensor"}),
    "stages": ({"pipe": 2}, {}),
}


def encoders(pipe):
    return {name: x for name, x in pipe.components.items() if name.startswith("text_encoder") and x is not None}


def add_lora(pipe):
    """Add the same LoRA on every rank, large enough to change the output measurably."""
    pipe.transformer.add_adapter(LoraConfig(r=3, target_modules=["to_q", "to_v"], init_lora_weights=False))
    generator = torch.Generator().manual_seed(11)
    for name, x in sorted(pipe.transformer.named_parameters()):
        if "lora_" in name:
            x.data.copy_(0.2 * torch.randn(x.shape, generator=generator))


def bytes_of(*modules):
    """Return the bytes of parameters that this rank holds."""
    held = [x.to_local() if isinstance(x, DTensor) else x for module in modules for x in module.parameters()]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}.values())


def write_gguf(transformer, path):
    """Write the weights to a GGUF file, with linear layers in 8 bits."""
    import gguf

    q8, f32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32
    writer = gguf.GGUFWriter(path, "flux")
    for name, x in transformer.state_dict().items():
        # Q8_0 shares a scale between 32 values of a row.
        if x.ndim == 2 and x.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(x.numpy(), q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, x.numpy(), raw_dtype=f32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
