"""The start of the simulated device: what it replaces in torch, in this process and for good."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.simulated_gpu import attention, collectives, groups, native, operators, streams
from tests.simulated_gpu.native import on_cpu
from tests.simulated_gpu.record import record

CAPABILITY = (9, 0)
_libraries: list[torch.library.Library] = []
_contexts = contextlib.ExitStack()


def install() -> None:
    """Make this process one with GPUs. It has no way back, so tests do this in processes of their own.

    Modules that read ``torch.cuda`` when they are imported should be imported afterwards.
    """
    if _libraries:
        return
    native.load()
    _replace_cuda()
    _register_operators()
    groups.replace_groups()
    collectives.replace_methods()
    if find_spec("triton") is not None:
        from tests.kernels.interpreted import interpreted

        _contexts.enter_context(interpreted(_before_launch))  # For good.
        _enlarge_blocks()


def _enlarge_blocks() -> None:
    """Let few programs of the small kernels do the work of many: the interpreter takes milliseconds for each program,
    whatever its size. tests/kernels tests the sizes of a GPU.
    """
    from para_core.kernels import row_blocks

    # Imported by name, because either kernel can be deleted.
    for name in ("para_core.kernels.norm", "para_core.kernels.residual"):
        if find_spec(name) is not None:
            kernel: Any = import_module(name)
            kernel.BLOCK, kernel.BLOCKS_PER_CHUNK = 1 << 14, 1
    row_blocks._ELEMENTS = 1 << 14


def _register_operators() -> None:
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(operators.run, "CUDA")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("copy_", operators.copy_, "CUDA")
    # torch would choose among kernels that a CPU lacks, such as _conv_depthwise2d.
    for name in ("convolution", "convolution_backward"):
        aten.impl(name, functools.partial(operators.run, getattr(torch.ops.aten, name).default), "CUDA")
    aten.impl("_fused_sdp_choice", attention.choose, "CUDA")
    for name, rule in attention.rules().items():
        aten.impl(name, rule, "CUDA")
    functional = torch.library.Library("_c10d_functional", "IMPL")
    for name, function in collectives.FUNCTIONAL.items():
        functional.impl(name, function, "CUDA")
    _libraries.extend((everything, aten, functional))


def use_device(index: int) -> None:
    """Make ``cuda:index`` the one GPU of this process. Using another one is then a fault."""
    streams.device.index = index
    torch._C._accelerator_setDeviceIndex(index)


def _set_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    if index is None or index < 0:
        return
    if streams.device.index is None:
        use_device(index)
    torch._C._accelerator_setDeviceIndex(index)


def _resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _own_resize(storage, size)
    view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    torch.ops.simulated_gpu.resize_storage.default(view, size)
    return storage


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _own_clone(storage)
    return torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device).untyped_storage().copy_(storage)


_own_resize, _own_clone = torch.UntypedStorage.resize_, torch.UntypedStorage.clone


def _replace_cuda() -> None:
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 << 30, multi_processor_count=132)
    properties.major, properties.minor = CAPABILITY
    properties.uuid = f"GPU-{os.environ.get('LOCAL_RANK', '0')}"
    default = torch.default_generator
    replaced: dict[str, Any] = {
        **{name: _constant(True) for name in ("is_available", "is_initialized", "is_bf16_supported")},
        **{name: _constant(None) for name in ("init", "_lazy_init", "empty_cache", "ipc_collect")},
        **{name: _constant(None) for name in ("reset_peak_memory_stats", "reset_max_memory_allocated")},
        **{name: _constant(0) for name in ("memory_allocated", "max_memory_allocated", "memory_reserved")},
        **{name: _constant(0) for name in ("max_memory_reserved", "utilization", "seed", "initial_seed")},
        "memory_stats": _constant({}),
        "device_count": _constant(8),
        "can_device_access_peer": _constant(True),
        "is_current_stream_capturing": _constant(False),
        "mem_get_info": _constant((70 << 30, 80 << 30)),
        "get_device_capability": _constant(CAPABILITY),
        "get_device_name": _constant(properties.name),
        "get_device_properties": _constant(properties),
        "current_device": torch._C._accelerator_getDeviceIndex,
        "set_device": _set_device,
        "device": _device,
        "device_of": _device,
        "synchronize": streams.synchronize,
        "Stream": streams.Stream,
        "Event": streams.Event,
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "current_stream": lambda *_: streams.current(),
        "default_stream": lambda *_: streams.default(),
        "set_stream": streams.set_current,
        # The CPU's generator serves both, so a pipeline draws the same numbers on either device.
        "manual_seed": default.manual_seed,
        "manual_seed_all": default.manual_seed,
        "get_rng_state": lambda *_: default.get_state(),
        "set_rng_state": lambda state, *_: default.set_state(state),
        "get_rng_state_all": lambda: [default.get_state()],
        "set_rng_state_all": lambda states: default.set_state(states[0]),
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.accelerator.current_stream = lambda *_: streams.current()
    torch.accelerator.set_stream = streams.set_current
    # Dynamo keeps a handler for each function, and takes no function under two names.
    torch.accelerator.synchronize = lambda *_: streams.synchronize()
    torch.random.fork_rng = _fork_rng
    torch.UntypedStorage.resize_, torch.UntypedStorage.clone = _resize, _clone
    Tensor.record_stream = lambda x, stream: None
    # Its C++ reads torch's own class of streams.
    torch.Stream = streams.Stream


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


@contextlib.contextmanager
def _device(*_: Any) -> Iterator[None]:
    """Stay on the one device that this rank has."""
    yield


@contextlib.contextmanager
def _fork_rng(*_: Any, **__: Any) -> Iterator[None]:
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def _before_launch(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Check the tensors of a Triton kernel, and return them on the CPU, where the interpreter runs it."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    operators.refuse_host_tensors(f"Triton kernel {name}", tensors)
    record.count("launches", name)
    record.counts[f"kernel: {name}"] += 1
    with streams.accessing(reads=tensors, writes=tensors):
        return tuple(on_cpu(x) if isinstance(x, Tensor) else x for x in args)


def install_in_program() -> None:
    """Install the device in a process of ``python -m tests.simulated_gpu``, which leaves its record in a file."""
    install()
    folder = Path(os.environ["SIMULATED_GPU"])
    _begin(folder)
    os.register_at_fork(after_in_child=lambda: _begin(folder))
    atexit.register(_leave_record, folder)
    # Ranks that a program drives end like this, or are killed: then the last copy of the thread counts.
    os._exit = functools.partial(_leave_and_exit, folder, os._exit)


def _begin(folder: Path) -> None:
    record.start_again()
    record.raises = False
    # Without a buffer: a rank may be killed.
    record.log_file = (folder / f"{os.getpid()}.log").open("ab", buffering=0)
    threading.Thread(target=_keep_leaving, args=(folder,), daemon=True, name="simulated GPU").start()


def _leave_and_exit(folder: Path, exit_now: Callable[[int], Any], code: int) -> None:
    _leave_record(folder)
    exit_now(code)


def _keep_leaving(folder: Path) -> None:
    while folder.exists():
        time.sleep(0.5)
        _leave_record(folder)


def _leave_record(folder: Path) -> None:
    if not record.counts or not folder.exists():
        return
    kept = {
        **groups.world.place(),
        "counts": dict(record.counts),
        "lines": {kind: dict(lines) for kind, lines in record.lines.copy().items()},
        "faults": dict(record.faults),
    }
    file = folder / f"{os.getpid()}.record"
    # The thread and the end of the process may write at the same time.
    own = file.with_suffix(f".{threading.get_ident()}")
    own.write_bytes(pickle.dumps(kept))
    own.replace(file)
