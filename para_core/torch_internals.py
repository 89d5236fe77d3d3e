"""All private names of torch that para_core uses.

The names were read in torch 2.11, 2.13 and 2.15. Comments say how these versions differ.
tests/test_torch_internals.py tests those whose change no other test would name, and that no other module uses
a private name of torch. Nothing here replaces a function or class of torch.

Classes and functions that appear in graphs are aliases, not wrappers, because Dynamo recognises them by
identity.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from operator import attrgetter
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

# The functions below use private names from torch/distributed/distributed_c10d.py, which manages process
# groups.


def process_groups() -> list[ProcessGroup]:
    """Return the process groups that exist in this process, including the default group."""
    return list(dist.distributed_c10d._world.pg_map)


def is_registered(group: ProcessGroup | None) -> bool:
    """Whether ``group`` exists in this process: torch.distributed has created it and not destroyed it."""
    return group in dist.distributed_c10d._world.pg_map


def new_process_group(
    name: str,
    ranks: Sequence[int],
    *,
    description: str,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> ProcessGroup:
    """Return a new process group of ``ranks``. Only these ranks call this function, and they find each other
    by ``name``.

    ``torch.distributed.new_group(use_local_synchronization=True)`` has two problems. It derives the group's
    name from the number of groups (torch 2.11, 2.13) or of calls (2.15) that a process has made, so ranks
    with different numbers wait for each other forever. And if the default group has a bound device
    (``init_process_group(device_id=...)``), it creates an NCCL group by ncclCommSplit, a collective over all
    ranks of the default group. The group of this function instead connects its members at the first use.

    Args:
        name: The same on all ``ranks``. No other group may have it, nor an ended one of the same store, which
            still holds the addresses of that group.
        ranks: Global ranks, including this one.
        description: Description of the group, for logs.
        backend, timeout: As in ``new_group``. Default to the backend of the default group, and torch's
            timeout for it.

    Raises:
        ValueError: This rank is not among ``ranks``, or a group has this name.
    """
    c10d: Any = dist.distributed_c10d
    default_backend, store = c10d._world.pg_map[c10d._get_default_group()]
    backend = dist.Backend(backend or default_backend)
    timeout = timeout or c10d._get_default_timeout(backend)
    members = sorted(ranks)
    if dist.get_rank() not in members:
        raise ValueError(
            f"rank {dist.get_rank()} cannot make a group of ranks {members}: it is not one of them."
        )
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
    """Return options that make torch create an NCCL group without splitting another group; None for other backends."""
    device_backends = dist.distributed_c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    if not any(str(name).startswith("nccl") for name in device_backends.values()):
        return None

    class Options(dist.ProcessGroupNCCL.Options):
        # torch 2.11 and 2.13 set this attribute to the group to split. The property ignores the value, so the
        # C++ options keep None.
        split_from = property(lambda self: None, lambda self, group: None)

    options = Options()
    options._timeout = timeout
    if hasattr(options, "lazy_init"):
        # In torch 2.15, lazy_init keeps torch from looking for a group to split.
        options.lazy_init = True
    return options


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """Return the backend of ``group`` for tensors on ``device``.
    Raise ``RuntimeError`` for an unsupported device.
    """
    return group._get_backend(device)


def group_devices(group: ProcessGroup) -> list[torch.device]:
    """Return the devices that ``group`` supports, in any order."""
    return list(group._device_types)


def group_timeout(group: ProcessGroup, device: torch.device | None = None) -> timedelta:
    """Return the timeout of the collectives of ``group``. ``device`` defaults to one that the group supports."""
    timeout: timedelta = backend_of(group, device or group_devices(group)[0]).options._timeout
    return timeout


def set_group_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of all further collectives of ``group``."""
    # TODO: remove _set_pg_timeout, the name before torch 2.15, when torch 2.15 is the minimum.
    set_timeout: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)


def group_named(name: str) -> ProcessGroup:
    """Return the process group with this ``group_name``. Raise ``RuntimeError`` if there is none.
    Graphs contain the names of groups instead of the groups.
    """
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    group: ProcessGroup = resolve(name)
    return group


@contextmanager
def registered_group_names(groups: Mapping[str, ProcessGroup]) -> Iterator[None]:
    """Let functional collectives find ``groups``, which torch.distributed has not made, by name inside the
    ``with`` block.
    """
    c10d: Any = torch._C._distributed_c10d
    with ExitStack() as stack:
        for name, group in groups.items():
            c10d._register_process_group(name, group)
            stack.callback(c10d._unregister_process_group, name)
        yield


def default_store() -> Any:
    """Return the key-value store of the default group, which connects its ranks."""
    return dist.distributed_c10d._get_default_store()


def abort_groups(groups: Sequence[ProcessGroup]) -> None:
    """Abort the collectives of ``groups`` on this rank, and unregister the groups.
    Other ranks are not informed.
    """
    backends = [backend_of(group, device) for group in groups for device in group_devices(group)]
    # Abort NCCL groups together, as torch does when it aborts all groups, because aborting one communicator
    # may wait for kernels of another one (pytorch#119797).
    together = next((backend for backend in backends if backend.name() == "nccl"), None)
    if together is not None:
        together._group_start()
    for group in groups:
        dist.distributed_c10d._abort_process_group(group)
    if together is not None:
        together._group_end()


# In a graph, this operator waits for a functional collective.
WAIT_TENSOR = torch.ops._c10d_functional.wait_tensor.default


# The names below are those for modes and tensor subclasses, from torch/overrides.py and
# torch/utils/_python_dispatch.py.

# Inside the first context, neither modes nor subclasses intercept torch functions. Inside the second, only
# modes do.
DisableTorchFunction = torch._C.DisableTorchFunction
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
# A tensor subclass that intercepts no functions has this __torch_function__.
disabled_torch_function = torch._C._disabled_torch_function_impl
# Returns a list of the function modes that are entered, innermost last.
function_mode_stack: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
# Returns the number of dispatch modes that are entered.
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# Creates a tensor without memory. The class of the tensor defines what operators do with it.
make_wrapper_subclass = Tensor._make_wrapper_subclass
FakeTensor = torch._subclasses.FakeTensor
FakeTensorMode = torch._subclasses.FakeTensorMode
# The logger that warns of operators that cannot run on fake tensors.
fake_tensor_logger = torch._subclasses.fake_tensor.log


# The names below are those of operators, from torch/_ops.py, torch/_library and
# aten/src/ATen/native/native_functions.yaml.

OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
HigherOrderOperator = torch._ops.HigherOrderOperator
CustomOpDef = torch._library.custom_ops.CustomOpDef
# These operators run mask and score functions, or a function marked by torch.compiler.nested_compile_region.
flex_attention_operator = _flex_attention
InvokeSubgraphHOP = _InvokeSubgraphHOP


def crop_block_mask(mask: BlockMask, num_queries: int, num_keys: int) -> BlockMask:
    """Return ``mask`` restricted to the first ``num_queries`` queries and ``num_keys`` keys."""
    cropped = mask._adjust(num_queries, num_keys)
    # Set the exact lengths, because torch 2.11 rounds both up to whole blocks.
    cropped.seq_lengths = (num_queries, num_keys)
    return cropped


def schema_of(operator: Any) -> Any:
    """Return the name, arguments and returns of an operator overload, and which of these it mutates or aliases."""
    return operator._schema


def call_kernel(operator: Any, device: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the kernel of ``operator`` for a device type (``"cpu"``, ``"cuda"`` or ``"meta"``), without
    autograd.

    A dispatch mode calls this after it has handled a call of ``operator``. The mode does not see the call
    again, but sees the operators that the kernel calls.
    """
    key = getattr(torch._C.DispatchKey, {"cuda": "CUDA", "meta": "Meta"}.get(device, "CPU"))
    return operator.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


to_copy = torch.ops.aten._to_copy.default
# The kernels of scaled_dot_product_attention that also return the lse, and their backward operators.
flash_attention_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_attention_on_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention.default
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
efficient_attention_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention.default
cudnn_attention_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
# These functions compute attention without calling scaled_dot_product_attention.
FUSED_ATTENTION_FUNCTIONS = (
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
    torch._scaled_dot_product_attention_math,
    torch._scaled_dot_product_flash_attention,
    torch._scaled_dot_product_efficient_attention,
    torch._scaled_dot_product_cudnn_attention,
)
# torch's own scaled_dot_product_attention, also if F.scaled_dot_product_attention was replaced.
scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention
# Spellings of softmax that torch.nn.functional and Tensor do not export.
NORMALIZING_FUNCTIONS = (torch._softmax, torch._log_softmax, torch._safe_softmax, torch._masked_softmax)
# Returns the number of the backend (SDPBackend) that scaled_dot_product_attention would choose.
fused_sdp_choice = torch._fused_sdp_choice
# Return whether sdpa_kernel(...) and torch.backends.cuda.enable_*_sdp(...) allow a backend. Unlike the public
# functions that call them, Dynamo treats them as constants.
flash_sdp_enabled = torch._C._get_flash_sdp_enabled
efficient_sdp_enabled = torch._C._get_mem_efficient_sdp_enabled
cudnn_sdp_enabled = torch._C._get_cudnn_sdp_enabled
math_sdp_enabled = torch._C._get_math_sdp_enabled
# Returns whether autocast is enabled for any device type; torch.is_autocast_enabled only checks one.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled


# The function below uses private names of Dynamo, from torch/_dynamo/eval_frame.py.


def no_frame_of_its_own(function: _Function) -> _Function:
    """Keep Dynamo from compiling ``function``, or functions that it calls, on their own. Return ``function``.

    Dynamo may still trace them as a part of other code. This is for ``__torch_function__`` of modes: after a
    graph break Dynamo compiles each frame that runs, and has no guard on which attribute of a tensor was
    requested from a mode. In torch 2.13, ``x.requires_grad`` then returned ``x.shape``.
    """
    eval_frame = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def is_compiled_code() -> bool:
    """Whether Dynamo traces this code, or compiles the frames that begin now: in compiled code, after a graph break."""
    return torch.compiler.is_compiling() or callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())


def _keep_frame(function: Callable[..., Any]) -> None:
    eval_frame = torch._C._dynamo.eval_frame
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


# Dynamo would compile the frame of this function, too, and warn that it cannot trace what it calls.
_keep_frame(is_compiled_code)


# The names below are those of autograd, from torch/utils/checkpoint.py and torch/autograd.

# torch.no_grad and torch.enable_grad call this function, which modes can intercept.
set_grad_enabled = torch._C._set_grad_enabled


def is_in_backward() -> bool:
    """Whether this thread is running a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


# Returns the innermost torch.autograd.graph.saved_tensors_hooks; None if none is set. With the argument True
# also while autograd traces, as in a backward of a graph. If a checkpoint made these hooks, a cell of their
# closure contains a CheckpointFrame.
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
CheckpointFrame = torch.utils.checkpoint._CheckpointFrame


def all_saved_tensors_hooks() -> list[Any]:
    """Return all ``saved_tensors_hooks`` that this thread has entered, the innermost first."""
    hooks: list[Any] = []
    if not vars(torch._C._autograd)["_saved_tensors_hooks_is_enabled"]():
        return hooks
    try:
        while (top := top_saved_tensors_hooks(True)) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            hooks.append(top)
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    return hooks


# In this dict, the value of FORWARD_AD_LEVEL is the number of entered forward_ad.dual_level contexts minus
# one. Each attention call reads it from the dict, because a function call would cost more.
forward_ad_globals = vars(forward_ad)
FORWARD_AD_LEVEL = "_current_level"


# Returns how often a tensor was changed in place. Raises ``RuntimeError`` for inference tensors, which do not
# count. It is no Python function, because a cache calls it for each argument of a model.
version_of: Callable[[Tensor], int] = attrgetter("_version")


def owner_of(x: Tensor) -> Tensor:
    """Return the tensor that ``x`` is a view of; ``x`` itself if ``x`` is not a view."""
    if x._base is None:
        return x
    return x._base


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies ``storage`` while it exists, also if several Python objects refer to it."""
    number: int = storage._cdata
    return number


# The names below are those of torch.func, from torch/_functorch.

# This function returns the innermost transform of torch.func that is running, or None. The transform's key()
# is a TransformType.
innermost_transform = torch._C._functorch.peek_interpreter_stack
TransformType = torch._C._functorch.TransformType
is_transform_tensor = torch._C._functorch.is_functorch_wrapped_tensor
is_grad_tracking_tensor = torch._C._functorch.is_gradtrackingtensor
unwrap_transform_tensor = torch._C._functorch.get_unwrapped
# This is a context manager, inside which no transform of torch.func is active.
DisableTransforms = torch._C._DisableFuncTorch


# The names below are those of torch.compile, from torch/_dynamo and torch/_guards.py.

# TracingContext and CompileContext describe what is being traced. A TraceId identifies one compilation of a
# frame.
TracingContext = torch._guards.TracingContext
CompileContext = torch._guards.CompileContext
TraceId = torch._guards.TraceId
# Dynamo raises exceptions of this base class for code that it cannot trace.
TorchDynamoException = torch._dynamo.exc.TorchDynamoException
# Inside a higher-order operator, this calls a function and permits its side effects, which Dynamo would
# refuse.
without_side_effect_checks = torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer


# This marks a function so that Dynamo traces its operators but not its Python code. Since torch 2.15 there is
# a public function, torch.compiler.nonstrict_trace.
nonstrict_trace: Callable[[Callable[..., Any]], Callable[..., Any]] = torch._dynamo.nonstrict_trace
# torch.compile sets these attributes: the first on the module that it returns, the second on a module
# compiled in place, and the third on a compiled function. The value of the third is the bound method that was
# compiled, or (torch 2.15) a function. The fourth is on the module that it returns, and holds the settings,
# as compile_context returns them.
ORIGINAL_MODULE = "_orig_mod"
COMPILED_CALL = "_compiled_call_impl"
ORIGINAL_CALLABLE = "_torchdynamo_orig_callable"
# What torch.compiler.disable returns has the attributes of what torch.compile returns, and this one.
DISABLED = "_torchdynamo_disable"
COMPILE_CONTEXT = "dynamo_ctx"


def compile_context(compiled: Any) -> Any:
    """Return the settings, such as ``fullgraph``, of a function that torch.compile returned; None for others."""
    if not hasattr(compiled, ORIGINAL_CALLABLE):
        return None
    # The closure of the compiled function refers to the object with the settings
    # (torch/_dynamo/eval_frame.py, _TorchDynamoContext.__call__).
    return inspect.getclosurevars(compiled).nonlocals.get("self")


# The names below are those of modules, from torch/nn/modules/module.py.

# SUBMODULES is the attribute of a module that holds its submodules. CALL_WITH_HOOKS is the method that runs
# hooks and forward; Module.__call__ and Module.compile look it up by name.
SUBMODULES = "_modules"
CALL_WITH_HOOKS = "_call_impl"
# The attributes of a module that hold its forward hooks.
FORWARD_PRE_HOOKS = "_forward_pre_hooks"
FORWARD_HOOKS = "_forward_hooks"
# This function parses the arguments of Module.to, and returns the device, dtype, non_blocking and memory
# format.
parse_to = torch._C._nn._parse_to


def parameter_slots(module: nn.Module) -> dict[str, Any]:
    """Return the dict of the parameters of ``module`` itself.
    Assigning to it replaces one without any checks.
    """
    return module._parameters


def buffer_slots(module: nn.Module) -> dict[str, Any]:
    """Return the dict that holds the buffers of ``module`` itself, without submodules."""
    return module._buffers


def forward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks of ``module`` that run before or after its ``forward``."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


@contextmanager
def without_hooks_after_load(module: nn.Module) -> Iterator[None]:
    """Inside this context, loading a state dict runs none of the hooks of ``module`` itself that follow it."""
    hooks = module._load_state_dict_post_hooks
    module._load_state_dict_post_hooks = OrderedDict()
    try:
        yield
    finally:
        module._load_state_dict_post_hooks = hooks


# The names below are those for nested containers, from torch/utils/_pytree.py, because torch has no public
# pytree.

pytree = torch.utils._pytree
tree_flatten = torch.utils._pytree.tree_flatten
tree_leaves = torch.utils._pytree.tree_leaves
tree_map = torch.utils._pytree.tree_map
tree_unflatten = torch.utils._pytree.tree_unflatten


# The class below uses private names for dispatch keys, from c10/core/DispatchKey.h and torch/library.py.


class SpareDispatchKey:
    """A dispatch key that torch does not use. Its kernels intercept operators in threads that turn the key
    on.

    The first use registers ``kernels``, by (namespace, name) of their operator, for the whole process, with a
    fallback that lets all other operators skip the key. If this build of torch does not have the key, or
    other code has registered anything under it, nothing is registered and the key is not available.
    """

    def __init__(self, name: str, kernels: Mapping[tuple[str, str], Callable[..., Any]]) -> None:
        self._name, self._kernels = name, kernels
        self._lock = threading.Lock()
        self._tried = False
        self._key: Any = None
        self._keys: Any = None
        # Keep references to the libraries, because torch removes a library's kernels when the library is
        # deleted.
        self._libraries: list[torch.library.Library] = []

    def is_available(self) -> bool:
        """Register the kernels at the first call, and return whether they are registered."""
        if not self._tried:
            with self._lock:
                if not self._tried:
                    self._register()
                    self._tried = True
        return self._key is not None

    def _register(self) -> None:
        """Register the kernels and the fallback, unless the key is missing or in use. The caller holds the lock."""
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
        """Return a context manager that turns the kernels on in this thread. The key must be available."""
        guard: AbstractContextManager[Any] = torch._C._IncludeDispatchKeyGuard(self._key)
        return guard

    def excluded(self) -> AbstractContextManager[Any]:
        """Return a context manager that turns the kernels off in this thread, also inside :meth:`included`."""
        if self._key is None:
            return nullcontext()
        guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(self._keys)
        return guard


def queued_cuda_seed() -> tuple[Any, int] | None:
    """Return the seed for CUDA that waits until CUDA is initialized, and an object that is new after each
    seeding.

    Return None if there is none. ``torch.manual_seed`` and ``torch.cuda.manual_seed`` queue a function with
    the seed in its closure (torch/cuda/__init__.py, ``_lazy_call``; the same in torch 2.11, 2.13 and 2.15).
    """
    calls = torch.cuda._lazy_seed_tracker.get_calls()
    if torch.cuda.is_initialized() or not calls:
        return None
    function, _ = calls[-1]
    return calls, int(inspect.getclosurevars(function).nonlocals["seed"])
