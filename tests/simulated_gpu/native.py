"""The C++ part: built once per version of torch and of its source, then loaded."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("device.cpp")


def build() -> Path:
    """Return the library, built with g++ in five seconds if it is not there yet."""
    version = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode() + torch.__file__.encode()).hexdigest()
    library = Path(tempfile.gettempdir()) / f"simulated_gpu_{os.getuid()}_{version[:16]}.so"
    if not library.exists():
        root = Path(torch.__file__).parent
        # Other processes may build it at the same time: each its own file, and the last one to end wins.
        own = library.with_suffix(f".{os.getpid()}")
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", abi, f"-I{root}/include", str(SOURCE)]
        subprocess.run([*command, f"-L{root}/lib", "-lc10", "-ltorch_cpu", "-o", str(own)], check=True)
        own.replace(library)
    return library


def load() -> None:
    """Register the device with torch. It cannot be removed from this process again."""
    torch.ops.load_library(str(build()))


def on_cpu(x: Tensor) -> Tensor:
    """Return the memory of ``x`` as a tensor of the CPU."""
    out: Tensor = torch.ops.simulated_gpu.on_cpu.default(x)
    return out


def on_device(x: Tensor, index: int) -> Tensor:
    """Return the memory of ``x`` as a tensor of ``cuda:index``."""
    out: Tensor = torch.ops.simulated_gpu.on_device.default(x, index)
    return out
