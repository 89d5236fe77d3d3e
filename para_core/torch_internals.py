"""Private names of torch that para_core uses, each in one place.

All were read in torch 2.11, 2.13 and 2.15; a comment says where these differ. tests/test_torch_internals.py has a test
per name, which says what breaks without it, and one that no other module uses a private name of torch. Nothing here
changes torch.

Classes and functions that graphs contain are aliases, not wrappers, because Dynamo recognizes them by identity.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch._dynamo.exc
import torch._dynamo.utils
import torch._guards
import torch._library.custom_ops
import torch._ops
import torch._subclasses
import torch.distributed as dist
import torch.overrides
import torch.utils._python_dispatch
import torch.utils._pytree
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import flex_attention as _flex_attention
from torch._higher_order_ops.invoke_subgraph import InvokeSubgraphHOP as _InvokeSubgraphHOP
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup
from torch.nn.attention.flex_attention import BlockMask

logger = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])

# -- process groups (torch/distributed/distributed_c10d.py)


def process_groups() -> list[ProcessGroup]:
    """Return the process groups that exist in this process, the default one included. ``_world.pg_map`` holds them as
    its keys.
    """
    return list(dist.distributed_c10d._world.pg_map)


def is_registered(group: ProcessGroup | None) -> bool:
    """Whether ``group`` exists in this process: it was made by torch.distributed and not destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def new_process_group(
    name: str, ranks: Sequence[int], *, description: str, backend: str | None = None, timeout: timedelta | None = None
) -> ProcessGroup:
    """Return a new group of ``ranks`` (ranks of the world, this one among them); only these ranks call this, and find
    each other by ``name``.

    ``torch.distributed.new_group(use_local_synchronization=True)`` does the same, but chooses the name from the number
    of groups (2.11,
    2.13) or of calls (2.15) that this process has seen: ranks that differ in it wait for each other for ever. And if
    the default group has a bound device (``init_process_group(device_id=...)``), it makes an NCCL group by
    ncclCommSplit, which is a collective over all ranks of the world. Here the members connect at the first use.

    Args:
        backend: as in ``new_group``; by default that of the default group.
        timeout: by default torch's for the backend.
    """
    c10d: Any = dist.distributed_c10d
    default_backend, store = c10d._world.pg_map[c10d._get_default_group()]
    backend = dist.Backend(backend or default_backend)
    timeout = timeout or c10d._get_default_timeout(backend)
    members = sorted(ranks)
    if dist.get_rank() not in members:
        raise ValueError(f"rank {dist.get_rank()} cannot make a group of ranks {members}: it is not one of them.")
    group: ProcessGroup
    group, _ = c10d._new_process_group_helper(
        len(members),
        members.index(dist.get_rank()),
        members,
        backend,
        store,
        name,
        backend_options=_nccl_options_without_split(backend, timeout),
        timeout=timeout,
        group_desc=description,
    )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(members)}
    return group


def _nccl_options_without_split(backend: str, timeout: timedelta) -> Any:
    """Return options with which torch makes an NCCL group without splitting another one; None for other backends."""
    device_backends = dist.distributed_c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    if not any(str(name).startswith("nccl") for name in device_backends.values()):
        return None

    class Options(dist.ProcessGroupNCCL.Options):
        # torch 2.11 and 2.13 assign the group to split; the C++ options keep None.
        split_from = property(lambda self: None, lambda self, group: None)

    options = Options()
    options._timeout = timeout
    if hasattr(options, "lazy_init"):
        options.lazy_init = True  # torch 2.15 then looks for no group to split.
    return options


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """Return what moves tensors on ``device`` among the ranks of ``group``.

    Raises:
        RuntimeError: the group does not serve that device.
    """
    return group._get_backend(device)


def group_devices(group: ProcessGroup) -> list[torch.device]:
    """Return the devices that ``group`` serves, in any order."""
    return list(group._device_types)


def group_timeout(group: ProcessGroup, device: torch.device | None = None) -> timedelta:
    """Return how long the collectives of ``group`` wait for a rank, on ``device`` or on any device that it serves."""
    timeout: timedelta = backend_of(group, device or group_devices(group)[0]).options._timeout
    return timeout


def set_group_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Let the collectives of ``group`` wait ``timeout`` for a rank that does not answer, from now on."""
    # TODO: drop the second name when torch>=2.15 is the minimum.
    set_timeout: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)


def group_named(name: str) -> ProcessGroup:
    """Return the group with this ``group_name``; graphs hold names."""
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    group: ProcessGroup = resolve(name)
    return group


def register_group_name(name: str, group: ProcessGroup) -> None:
    """Let functional collectives find ``group``, which torch.distributed did not make, by ``name``."""
    c10d: Any = torch._C._distributed_c10d
    c10d._register_process_group(name, group)


def unregister_group_name(name: str) -> None:
    """Undo :func:`register_group_name`."""
    c10d: Any = torch._C._distributed_c10d
    c10d._unregister_process_group(name)


def default_store() -> Any:
    """Return the store by which the ranks of the default group found each other."""
    return dist.distributed_c10d._get_default_store()


def abort_groups(groups: Sequence[ProcessGroup]) -> None:
    """End all that runs on ``groups``, and remove them from torch's table. Only this rank's part: the others call it
    themselves.
    """
    backends = [backend_of(group, device) for group in groups for device in group_devices(group)]
    # Together, as torch ends all groups at once: ending one communicator may wait for kernels of another
    # (pytorch#119797).
    together = next((backend for backend in backends if backend.name() == "nccl"), None)
    if together is not None:
        together._group_start()
    for group in groups:
        dist.distributed_c10d._abort_process_group(group)
    if together is not None:
        together._group_end()


# An operator that waits for a functional collective. Graphs contain it.
WAIT_TENSOR = torch.ops._c10d_functional.wait_tensor.default


# -- FSDP2 (torch/distributed/fsdp/_fully_shard, torch/distributed/_composable)


def remove_fsdp(module: nn.Module) -> None:
    """Take FSDP2 off ``module``, whose parameters are sharded; its class stays. torch has no public way."""
    # Importing FSDP2 takes a while, and few programs need it.
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import fully_shard

    state = fully_shard.state(module)  # type: ignore[attr-defined]
    for handle in _fsdp_hook_handles(state):
        handle.remove()
    del module.__dict__[STATE_KEY], module.__dict__[REGISTRY_KEY]
    _module_state_mapping.pop(module, None)
    for managed in module.modules():
        for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            managed.__dict__.pop(name, None)


def _fsdp_hook_handles(state: Any) -> Iterator[Any]:
    yield from (state._pre_forward_hook_handle, state._post_forward_hook_handle)
    # One group (torch 2.11), or several.
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        if group is not None:
            yield from group._module_to_pre_save_state_dict_hook_handle.values()
            yield from group._module_to_pre_load_state_dict_hook_handle.values()
            yield from (parameter._post_load_hook_handle for parameter in group.fsdp_params)


# -- modes and subclasses (torch/overrides.py, torch/utils/_python_dispatch.py)

# Inside, neither modes nor subclasses intercept functions of torch; with the second, modes still do.
DisableTorchFunction = torch._C.DisableTorchFunction
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
# As ``__torch_function__`` of a subclass: it intercepts nothing.
disabled_torch_function = torch._C._disabled_torch_function_impl
# Number of function modes that are entered, and the modes themselves, the innermost last.
count_function_modes = torch._C._len_torch_function_stack
function_mode_stack: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
# A tensor without memory whose class defines what operators do with it.
make_wrapper_subclass = Tensor._make_wrapper_subclass
FakeTensor = torch._subclasses.FakeTensor
FakeTensorMode = torch._subclasses.FakeTensorMode


# -- operators (torch/_ops.py, torch/_library, aten/src/ATen/native/native_functions.yaml)

OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
HigherOrderOperator = torch._ops.HigherOrderOperator
CustomOpDef = torch._library.custom_ops.CustomOpDef
# Operators that run a function: flex_attention's mask and score function, and torch.compiler.nested_compile_region.
flex_attention_operator = _flex_attention
InvokeSubgraphHOP = _InvokeSubgraphHOP


def crop_block_mask(mask: BlockMask, num_queries: int, num_keys: int) -> BlockMask:
    """Return ``mask`` of the first queries and keys."""
    cropped = mask._adjust(num_queries, num_keys)
    # torch 2.11 rounds both lengths up to whole blocks.
    cropped.seq_lengths = (num_queries, num_keys)
    return cropped


def schema_of(operator: Any) -> Any:
    """Return the schema of an overload: its name, arguments, returns, and which of them it changes or aliases."""
    return operator._schema


def call_kernel(operator: Any, device: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the kernel of ``operator`` for ``"cpu"``, ``"cuda"`` or ``"meta"``, below autograd and below dispatch modes
    that have seen it. Modes see the operators that the kernel calls.
    """
    key = getattr(torch._C.DispatchKey, {"cuda": "CUDA", "meta": "Meta"}.get(device, "CPU"))
    return operator.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


to_copy = torch.ops.aten._to_copy.default
# Backends of scaled_dot_product_attention that return lse too, and their gradients.
flash_attention_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_attention_on_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention.default
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
efficient_attention_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention.default
cudnn_attention_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
# Functions that compute attention without scaled_dot_product_attention.
FUSED_ATTENTION_FUNCTIONS = (
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
    torch._scaled_dot_product_attention_math,
    torch._scaled_dot_product_flash_attention,
    torch._scaled_dot_product_efficient_attention,
    torch._scaled_dot_product_cudnn_attention,
)
# Number of the backend (SDPBackend) that scaled_dot_product_attention would choose.
fused_sdp_choice = torch._fused_sdp_choice
# What sdpa_kernel(...) and torch.backends.cuda.enable_*_sdp(...) switch. Dynamo takes these for constants, and not the
# public functions that call them.
flash_sdp_enabled = torch._C._get_flash_sdp_enabled
efficient_sdp_enabled = torch._C._get_mem_efficient_sdp_enabled
cudnn_sdp_enabled = torch._C._get_cudnn_sdp_enabled
math_sdp_enabled = torch._C._get_math_sdp_enabled
# Of any device; torch.is_autocast_enabled asks about one.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled


# -- Dynamo (torch/_dynamo/eval_frame.py)


def no_frame_of_its_own(function: _Function) -> _Function:
    """Keep Dynamo from compiling ``function``, and what it calls, except as a part of a function that it traces.

    For ``__torch_function__`` of modes. Behind a graph break Dynamo compiles each frame that runs, and does not guard
    which attribute of a tensor a mode is asked for: in torch 2.13 ``x.requires_grad`` then was ``x.shape``.
    """
    eval_frame = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


# -- autograd (torch/utils/checkpoint.py, torch/autograd)

# What torch.no_grad and torch.enable_grad call; a mode sees it.
set_grad_enabled = torch._C._set_grad_enabled
# -1 outside of a backward.
current_graph_task_id = torch._C._current_graph_task_id
# The innermost torch.autograd.graph.saved_tensors_hooks. Of a checkpoint, a cell of its closure is a CheckpointFrame.
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
saved_tensors_hooks_are_enabled: Callable[[], bool] = vars(torch._C._autograd)["_saved_tensors_hooks_is_enabled"]
CheckpointFrame = torch.utils.checkpoint._CheckpointFrame


def all_saved_tensors_hooks() -> list[Any]:
    """Return all ``saved_tensors_hooks`` that are entered in this thread, the innermost first."""
    hooks: list[Any] = []
    if not saved_tensors_hooks_are_enabled():
        return hooks
    try:
        while (top := top_saved_tensors_hooks(True)) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            hooks.append(top)
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    return hooks


# At this key the number of forward_ad.dual_level that are entered, less one. A dict, because each attention call reads
# it and a function would cost more.
forward_ad_globals = vars(forward_ad)
FORWARD_AD_LEVEL = "_current_level"


def version_of(x: Tensor) -> int:
    """Return the number of in-place changes of ``x``. Inference tensors have none, and raise ``RuntimeError``."""
    return x._version


def owner_of(x: Tensor) -> Tensor:
    """Return the tensor of which ``x`` is a view; ``x`` itself if it is none."""
    return x if x._base is None else x._base


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that is the same for all Python objects of one storage while it exists."""
    number: int = storage._cdata
    return number


# -- torch.func (torch/_functorch)

# The innermost transform that runs, or None; its key() is a TransformType.
innermost_transform = torch._C._functorch.peek_interpreter_stack
TransformType = torch._C._functorch.TransformType
is_transform_tensor = torch._C._functorch.is_functorch_wrapped_tensor
is_grad_tracking_tensor = torch._C._functorch.is_gradtrackingtensor
unwrap_transform_tensor = torch._C._functorch.get_unwrapped
# Inside, no transform runs.
DisableTransforms = torch._C._DisableFuncTorch


# -- torch.compile (torch/_dynamo, torch/_guards.py)

# What is traced right now, and the how-manieth time.
TracingContext = torch._guards.TracingContext
CompileContext = torch._guards.CompileContext
TraceId = torch._guards.TraceId
# The base of what Dynamo raises about a function that it cannot trace.
TorchDynamoException = torch._dynamo.exc.TorchDynamoException
# Calls a function whose side effects Dynamo would refuse inside an operator that runs functions.
without_side_effect_checks = torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer


def nonstrict_trace(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which Dynamo puts into graphs by tracing its operators instead of its Python code."""
    # Public in torch.compiler from 2.15 on.
    traced: Callable[..., Any] = torch._dynamo.nonstrict_trace(function)
    return traced


# Attributes of what torch.compile returns: of a module compiled as a whole, of one compiled in place, and of a
# function. The value of the last is the bound method that was compiled, or (torch 2.15) a function.
ORIGINAL_MODULE = "_orig_mod"
COMPILED_CALL = "_compiled_call_impl"
ORIGINAL_CALLABLE = "_torchdynamo_orig_callable"


def compile_context(compiled: Any) -> Any:
    """Return the settings of a function that torch.compile returned, such as ``fullgraph``; None for any other
    function.
    """
    if not hasattr(compiled, ORIGINAL_CALLABLE):
        return None
    # Dynamo's function keeps its settings in a closure (torch/_dynamo/eval_frame.py, _TorchDynamoContext.__call__).
    return inspect.getclosurevars(compiled).nonlocals.get("self")


# -- modules (torch/nn/modules/module.py)

# The attribute with the submodules, and the method that runs hooks and forward, which Module.__call__ and
# Module.compile look up.
SUBMODULES = "_modules"
CALL_WITH_HOOKS = "_call_impl"
# Reads the arguments of Module.to: device, dtype, non_blocking, memory format.
parse_to = torch._C._nn._parse_to


def parameter_slots(module: nn.Module) -> dict[str, Any]:
    """Return the parameters of ``module`` itself by name. Assigning to it checks nothing, unlike
    ``register_parameter``.
    """
    return module._parameters


def buffer_slots(module: nn.Module) -> dict[str, Any]:
    """Return the buffers of ``module`` itself by name."""
    return module._buffers


def forward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks that run after ``forward``."""
    return list(module._forward_hooks.values())


# -- nested containers (torch/utils/_pytree.py; torch has no public pytree)

pytree = torch.utils._pytree
tree_flatten = torch.utils._pytree.tree_flatten
tree_leaves = torch.utils._pytree.tree_leaves
tree_map = torch.utils._pytree.tree_map
tree_unflatten = torch.utils._pytree.tree_unflatten


# -- a dispatch key of our own (c10/core/DispatchKey.h, torch/library.py)


class SpareDispatchKey:
    """A dispatch key that no kernel of torch has, whose kernels run in threads and blocks of code that ask for them.

    Nothing is registered before the first use, which registers for the whole process: a fallback, by which all other
    operators skip the key, and ``kernels``. If this build of torch has no such key, or somebody else registered
    anything under it, the key is not available and nothing is registered.

    Args:
        name: of the key.
        kernels: a function per operator (namespace and name), also of operators that are not defined yet.
    """

    def __init__(self, name: str, kernels: Mapping[tuple[str, str], Callable[..., Any]]) -> None:
        self._name, self._kernels = name, kernels
        self._lock = threading.Lock()
        self._tried = False
        self._key: Any = None
        self._keys: Any = None
        # torch removes what a library registered when the library is deleted.
        self._libraries: list[torch.library.Library] = []

    def is_available(self) -> bool:
        """Register the kernels unless that was tried before; return whether they are registered."""
        if not self._tried:
            with self._lock:
                if not self._tried:
                    self._register()
                    self._tried = True
        return self._key is not None

    def _register(self) -> None:
        try:
            key = torch._C._dispatch_key_parse(self._name)
            if torch._C._dispatch_has_backend_fallback(key):
                return
            if torch._C._dispatch_get_registrations_for_dispatch_key(self._name):
                return
            libraries = [fallback := torch.library.Library("_", "IMPL")]
            fallback.fallback(torch.library.fallthrough_kernel, self._name)
            for (namespace, operator), kernel in self._kernels.items():
                libraries.append(library := torch.library.Library(namespace, "IMPL"))
                library.impl(operator, kernel, self._name)
        except (RuntimeError, AttributeError) as error:
            logger.debug("no kernels under the dispatch key %s: %s", self._name, error)
            return
        self._key, self._keys, self._libraries = key, torch._C.DispatchKeySet(key), libraries

    def included(self) -> AbstractContextManager[Any]:
        """Inside, in this thread, the kernels run. Only if the key :meth:`is_available`."""
        guard: AbstractContextManager[Any] = torch._C._IncludeDispatchKeyGuard(self._key)
        return guard

    def excluded(self) -> AbstractContextManager[Any]:
        """Inside, in this thread, the kernels do not run, also inside :meth:`included`. Without registration nothing
        has to be excluded.
        """
        if self._key is None:
            return nullcontext()
        guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(self._keys)
        return guard
