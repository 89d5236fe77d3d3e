"""A canary for each private name of torch: it fails if a version of torch lacks or changes the name, and says what
breaks.

Run it with each supported torch: 2.11, 2.13, 2.15. Each test uses the name as para_core does, in one process.
"""

import ast
import logging
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import para_core
from para_core import torch_internals as internals

ROOT = Path(para_core.__file__).parents[1]
Q = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")


@pytest.fixture
def world(tmp_path):
    """Create a default group of this process alone."""
    if dist.is_initialized():
        pytest.fail("another test left a process group")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    yield dist.group.WORLD
    dist.destroy_process_group()


class Watch(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


# -- No private names elsewhere.


def private_names(source):
    """Return the private names of torch that a module uses: imports, and attributes of objects imported from torch."""
    tree, imported, names = ast.parse(source), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = [
                (alias.asname or alias.name.split(".")[0], alias.name if alias.asname else "torch", alias.name)
                for alias in node.names
            ]
        elif isinstance(node, ast.ImportFrom):
            paths = [
                (alias.asname or alias.name, f"{node.module}.{alias.name}", f"{node.module}.{alias.name}")
                for alias in node.names
            ]
        else:
            continue
        for name, value, path in paths:
            if path.split(".")[0] == "torch":
                imported[name] = value
                names |= {path for part in path.split(".") if part.startswith("_")}
    for expression in ast.walk(tree):
        node, parts = expression, []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in imported:
            path = ".".join([imported[node.id], *reversed(parts)])
            names |= {path for part in parts if part.startswith("_") and not part.startswith("__")}
    return names


# torch offers no other spelling for these attributes, and they are written as often as read.
ATTRIBUTES = {
    "_base",
    "_buffers",
    "_call_impl",
    "_cdata",
    "_compiled_call_impl",
    "_device_types",
    "_forward_hooks",
    "_get_backend",
    "_orig_mod",
    "_schema",
    "_torchdynamo_orig_callable",
    "_version",
}


def sources():
    folders = ("para_core", "adapters", "fleet", "cli", "kernels", "cache_examples", "parallel_examples")
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name != "torch_internals.py":
                yield path.relative_to(ROOT), path.read_text()


def test_no_other_module_uses_a_private_name_of_torch():
    names_by_path = {str(path): sorted(private_names(source)) for path, source in sources()}
    assert {path: names for path, names in names_by_path.items() if names} == {}


def test_no_other_module_reads_a_private_attribute_of_torch():
    reads = {
        f"{path}:{node.lineno} {node.attr}"
        for path, source in sources()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES
    }
    assert reads == set()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["unittest", "ctypes", "mock"])
def test_no_module_imports_tools_of_tests_or_of_c(name):
    paths = [
        str(path)
        for path, source in sources()
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == name)
        or (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == name for alias in node.names))
    ]
    assert paths == []


def test_the_search_sees_private_names():
    source = (
        "import torch\nfrom torch.utils import _pytree as tree\nx = torch._C._nn._parse_to\ny = tree.tree_map\n"
        "z = torch.__version__"
    )
    assert private_names(source) == {"torch.utils._pytree", "torch._C._nn._parse_to", "torch._C._nn", "torch._C"}


def test_importing_it_needs_no_fsdp_and_no_inductor():
    source = (ROOT / "para_core" / "torch_internals.py").read_text()
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    text = " ".join(ast.unparse(node) for node in imports)
    assert "fsdp" not in text and "_inductor" not in text and "_composable" not in text


# -- Names that one expression uses. Each row says what happens without the name.


def module_with_a_hook(register):
    module = nn.Linear(2, 2)
    return module, getattr(module, register)(lambda *_: None)


def functions_seen(call):
    """Return the functions that a mode sees in ``call``."""
    with Watch() as watch:
        call()
    return watch.functions


def is_seen_by_dispatch_mode():
    functions = []

    class Record(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            functions.append(func)
            return func(*args, **(kwargs or {}))

    with Record():
        Q + 1
    return functions == [torch.ops.aten.add.Tensor]


def has_shapes_without_data():
    with internals.FakeTensorMode() as mode:
        x = torch.empty(3, 4) @ torch.empty(4, 5)
    return isinstance(x, internals.FakeTensor) and x.fake_mode is mode and x.shape == (3, 5)


def stack_is_listed():
    with Watch() as outer, Watch() as inner:
        stack = internals.function_mode_stack()
    return stack == [outer, inner] and internals.function_mode_stack() == []


def modes_are_off():
    with Watch() as watch:
        with internals.DisableTorchFunction():
            Q + 1
        unseen = not watch.functions
        with internals.DisableTorchFunctionSubclass():
            Q + 1
    return unseen and len(watch.functions) == 1


def bypasses_torch_function():
    plain = type("Plain", (Tensor,), {"__torch_function__": internals.disabled_torch_function})
    return type(torch.ones(2).as_subclass(plain) + 1) is Tensor


@torch.library.custom_op("para_core_tests::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


def operators_have_classes():
    add, cond = torch.ops.aten.add, torch.ops.higher_order.cond
    is_overload = type(add.Tensor) is internals.OpOverload and type(add) is internals.OpOverloadPacket
    return is_overload and isinstance(cond, internals.HigherOrderOperator) and type(double) is internals.CustomOpDef


def flex_attention_is_an_operator():
    operator = import_module("torch.nn.attention.flex_attention").flex_attention_hop
    return operator is internals.flex_attention_operator is torch.ops.higher_order.flex_attention


def schema_has_names_and_aliases():
    schema = internals.schema_of(torch.ops.aten.add_.Tensor)
    facts = schema.name, schema.is_mutable, len(schema.arguments), schema.returns[0].alias_info is not None
    return facts == ("aten::add_", True, 3, True)


def flash_attention_has_lse_and_gradient():
    q = Q.clone().requires_grad_()
    expected = torch.autograd.grad(F.scaled_dot_product_attention(q, Q, Q).sum(), q)[0]
    out, lse = internals.flash_attention_on_cpu(Q, Q, Q)[:2]
    grad = internals.flash_attention_on_cpu_backward(torch.ones_like(out), Q, Q, Q, out, lse, 0.0, False)[0]
    scores = Q.double() @ Q.double().mT / 8**0.5
    pairs = (out, scores.softmax(-1) @ Q.double()), (lse, scores.logsumexp(-1)), (grad, expected)
    return all(torch.allclose(x.double(), y.double(), atol=1e-6) for x, y in pairs)


# Each backend of attention has a switch. Other attention operators of a GPU take the arguments of flash and more.
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
BEGIN, END = ["query", "key", "value"], ["dropout_p", "is_causal"]
ARGUMENTS = {
    "flash_attention": [*BEGIN, *END, "return_debug_mask", "scale"],
    "efficient_attention": [*BEGIN, "attn_bias", "compute_log_sumexp", *END, "scale"],
    "cudnn_attention": [*BEGIN, "attn_bias", "compute_log_sumexp", *END, "return_debug_mask", "scale"],
}


def backends_have_switches():
    for backend in BACKENDS.values():
        with sdpa_kernel(backend):
            enabled = {name: getattr(internals, f"{name}_sdp_enabled")() for name in BACKENDS}
        if enabled != {name: other is backend for name, other in BACKENDS.items()}:
            return False
    return True


def operators_of_a_gpu_take_these_arguments():
    for operator, arguments in ARGUMENTS.items():
        forward = internals.schema_of(getattr(internals, operator)).arguments
        backward = internals.schema_of(getattr(internals, f"{operator}_backward")).arguments
        if [x.name for x in forward] != arguments or [x.name for x in backward][1:4] != BEGIN:
            return False
    return True


def backend_is_chosen():
    with sdpa_kernel(SDPBackend.MATH):
        return internals.fused_sdp_choice(Q, Q, Q, None, 0.0, False) == SDPBackend.MATH.value


def autocast_is_seen():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return internals.is_any_autocast_enabled()


def no_grad():
    with torch.no_grad():
        pass


def backward_is_recognized():
    during, x = [internals.is_in_backward()], torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: during.append(internals.is_in_backward()))
    (x * 2).sum().backward()
    return during == [False, True]


def level_of_forward_ad():
    with torch.autograd.forward_ad.dual_level():
        inside = internals.forward_ad_globals[internals.FORWARD_AD_LEVEL]
    return (inside, internals.forward_ad_globals[internals.FORWARD_AD_LEVEL]) == (0, -1)


def version_counts():
    x = torch.zeros(2)
    before = internals.version_of(x)
    x += 1
    return internals.version_of(x) == before + 1


def storages_differ():
    x = torch.zeros(2, 3)
    own, view, other = (internals.storage_id(y.untyped_storage()) for y in (x, x[1], torch.zeros(6)))
    return own == view != other


def owner_of_a_view_is_known():
    x = torch.zeros(2, 3)
    return internals.owner_of(x[0][1:]) is x and internals.owner_of(x) is x


def errors_of_dynamo_have_a_base():
    torch._dynamo.reset()
    with pytest.raises(internals.TorchDynamoException):
        torch.compile(lambda x: x + 1 if x.sum() > 0 else x, backend="eager", fullgraph=True)(torch.ones(2))
    return True


def weights_can_be_replaced():
    module = nn.BatchNorm1d(3)
    internals.parameter_slots(module)["weight"] = weight = nn.Parameter(torch.full((3,), 2.0))
    names = list(internals.parameter_slots(module)), list(internals.buffer_slots(module))
    parts = list(vars(nn.Sequential(module))[internals.SUBMODULES].values())
    expected = ["weight", "bias"], ["running_mean", "running_var", "num_batches_tracked"]
    return names == expected and module.weight is weight and parts == [module]


def hooks_are_listed():
    module, hook = module_with_a_hook("register_forward_hook")
    before, pre_hook = module_with_a_hook("register_forward_pre_hook")
    is_named = list(vars(before)[internals.FORWARD_PRE_HOOKS]) == [pre_hook.id]
    return is_named and list(vars(module)[internals.FORWARD_HOOKS]) == [hook.id] and internals.forward_hooks(module)


def call_runs_the_method_with_hooks():
    module = nn.Linear(2, 2)
    setattr(module, internals.CALL_WITH_HOOKS, lambda x: "hooked")
    return module(torch.ones(2)) == "hooked"


def arguments_of_to_are_parsed():
    device, dtype, *_ = internals.parse_to("meta", torch.float16)
    parsed = device, dtype, internals.parse_to(dtype=torch.float64)[0]
    return parsed == (torch.device("meta"), torch.float16, None)


def trees_are_flattened_and_mapped():
    tree = {"a": [1, (2, None)], "b": 3}
    leaves, spec = internals.tree_flatten(tree)
    negative = internals.tree_map(lambda x: x if x is None else -x, tree)
    texts = internals.pytree.tree_map_only(int, str, tree)
    is_whole = leaves == internals.tree_leaves(tree) and internals.tree_unflatten(leaves, spec) == tree
    return is_whole and negative == {"a": [-1, (-2, None)], "b": -3} and texts == {"a": ["1", ("2", None)], "b": "3"}


CANARIES = {
    "collectives of one graph are not kept in order": lambda: (
        internals.WAIT_TENSOR.name() == "_c10d_functional::wait_tensor"
    ),
    "para_core's modes would intercept its own operators": modes_are_off,
    "every function on a lazy tensor runs Python": bypasses_torch_function,
    "attention under a user's mode would be intercepted in the wrong order": stack_is_listed,
    "the planner cannot observe a model": is_seen_by_dispatch_mode,
    "the planner cannot count a model without its weights": has_shapes_without_data,
    "`para_core plan` prints torch's tracebacks for a model that it cannot count": lambda: (
        isinstance(internals.fake_tensor_logger, logging.Logger)
        and internals.fake_tensor_logger.name.startswith("torch.")
    ),
    "operators of other packages, and those that run functions, are not recognized": operators_have_classes,
    "flex_attention attends to a rank's own tokens without an error": flex_attention_is_an_operator,
    "attention inside a nested region covers a rank's own tokens without an error": lambda: isinstance(
        torch.ops.higher_order.invoke_subgraph, internals.InvokeSubgraphHOP
    ),
    "operators of flash-attn cannot be bound, and in-place ones not recognized": schema_has_names_and_aliases,
    "a PipeFusion patch that changes its dtype would be computed as a whole tensor": lambda: torch.equal(
        internals.to_copy(Q, dtype=torch.float64), Q.double()
    ),
    "ring attention on the CPU has no backend and no gradient": flash_attention_has_lse_and_gradient,
    "ring attention on a GPU has no backend": operators_of_a_gpu_take_these_arguments,
    "another backend than torch would choose gives other numbers": backend_is_chosen,
    "`sdpa_kernel` is ignored": backends_have_switches,
    "ring attention in autocast merges in another dtype than torch computes": lambda: (
        autocast_is_seen() and not internals.is_any_autocast_enabled()
    ),
    "a reentrant checkpoint is not bound to the mode, and recomputes another function": lambda: (
        internals.set_grad_enabled in functions_seen(no_grad)
    ),
    "attention that a checkpoint recomputes is refused, or computed on one rank only": backward_is_recognized,
    "tangents of attention over several ranks would be lost without an error": level_of_forward_ad,
    "a mask or condition that is changed in place is taken for the earlier one": version_counts,
    "the mask is reviewed again for each layer's view": owner_of_a_view_is_known,
    "the planner counts the memory of views twice": storages_differ,
    "a cache policy that cannot be compiled raises Dynamo's error": errors_of_dynamo_have_a_base,
    "weights cannot be replaced while a block runs": weights_can_be_replaced,
    "a user's hooks inside a parallel model are not found": hooks_are_listed,
    "a plan on a module does not run": call_runs_the_method_with_hooks,
    "moving sharded weights fails in the next call, not in `to`": arguments_of_to_are_parsed,
    "arguments nested in dicts and lists are neither sharded nor checked": trees_are_flattened_and_mapped,
}


@pytest.mark.parametrize("without", CANARIES)
def test_name_is_as_it_was(without):
    assert CANARIES[without](), f"{without}, because torch changed the name"


# -- Process groups.


def test_groups_are_listed_named_and_aborted(world):
    """Check the names by which groups are found. Without them each model would create new communicators, check_parallel
    could not run virtual ranks, and a generation that failed on one rank leaves kernels that run for ever.
    """
    assert internals.process_groups() == [world]
    assert internals.is_registered(world) and not internals.is_registered(None)
    groups = [dist.new_group([0]) for _ in range(2)]
    assert set(internals.process_groups()) == {world, *groups}
    internals.abort_groups(groups)
    assert internals.process_groups() == [world]
    assert not internals.is_registered(groups[0])
    virtual = dist.ProcessGroup(0, 1)
    with internals.registered_group_names({"virtual": virtual}):
        assert internals.group_named("virtual") is virtual
    with pytest.raises(RuntimeError):
        internals.group_named("virtual")
    # Without the default store, links between stages reuse numbers, and ranks do not learn of failures.
    store = internals.default_store()
    assert [store.add("count", 1), store.add("count", 1)] == [1, 2]
    # Without _group_start and _group_end, ending one communicator may wait for kernels of another.
    calls = mock.Mock(**{"name.return_value": "nccl"})
    with (
        mock.patch.object(internals, "backend_of", lambda *_: calls),
        mock.patch.object(dist.distributed_c10d, "_abort_process_group", calls.abort),
    ):
        internals.abort_groups([world])
    assert [call[0] for call in calls.method_calls if call[0] != "name"] == ["_group_start", "abort", "_group_end"]


def test_timeouts_of_groups_are_read_and_set(world):
    """Check the time-outs. Without them ``parallelize_pipe(timeout=...)`` does nothing."""
    default = internals.new_process_group("a name", [0], description="")
    assert internals.group_timeout(default) == internals.group_timeout(dist.new_group([0]))
    group = dist.new_group([0], timeout=timedelta(seconds=50))
    assert internals.group_timeout(group, CPU) == timedelta(seconds=50)
    internals.set_group_timeout(group, timedelta(seconds=9))
    assert internals.group_timeout(group, CPU) == timedelta(seconds=9)


def test_new_process_group_helper_makes_a_usable_group(world):
    """Check ``find_or_make_group``. Without it ranks with different numbers of earlier groups wait for each other for
    ever.
    """
    timeout = timedelta(seconds=7)
    group = internals.new_process_group("a name", [0], description="a description", timeout=timeout)
    assert (group.group_name, group.group_desc) == ("a name", "a description")
    assert (group.rank(), group.size(), dist.get_process_group_ranks(group)) == (0, 1, [0])
    assert internals.group_timeout(group) == timeout
    assert dist.get_backend(group) == "gloo"
    dist.all_reduce(x := torch.ones(2), group=group)
    assert x.tolist() == [1.0, 1.0]
    assert internals.group_named("a name") is group
    with pytest.raises(ValueError):  # torch accepts a name once.
        internals.new_process_group("a name", [0], description="another")
    dist.destroy_process_group(group)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "fake", "cpu:gloo,cuda:gloo"])
def test_backend_config_reads_the_backends_of_a_group(world, backend):
    """Check the backends of a group. Without them an NCCL group of some ranks would be split from the default one,
    which hangs.
    """
    if backend == "fake":
        import torch.testing._internal.distributed.fake_pg  # noqa: F401
    assert internals._nccl_options_without_split(backend, timedelta(seconds=1)) is None
    group = internals.new_process_group("of " + backend, [0], description="", backend=backend)
    assert dist.get_backend(group) is not None


def test_device_types_and_get_backend_name_the_backend(world):
    """Check what moves the tensors of a group. Otherwise NCCL is taken for gloo by the check for shared GPUs, host
    groups and links.
    """
    group = dist.new_group([0], backend="cpu:gloo,cuda:gloo")
    assert {device.type for device in internals.group_devices(group)} == {"cpu", "cuda"}
    assert internals.backend_of(group, CPU).name() == "gloo"
    with pytest.raises(RuntimeError):
        internals.backend_of(dist.new_group([0], backend="cpu:gloo"), torch.device("cuda"))


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")
def test_nccl_has_group_start_and_options_to_split():
    assert hasattr(dist.ProcessGroupNCCL, "_group_start") and hasattr(dist.ProcessGroupNCCL, "_group_end")
    assert hasattr(dist.ProcessGroupNCCL.Options, "split_from")
    options = internals._nccl_options_without_split("cpu:gloo,cuda:nccl", timedelta(seconds=3))
    options.split_from = "the default group"
    assert dist.ProcessGroupNCCL.Options.split_from.__get__(options) is None
    assert options._timeout == timedelta(seconds=3)


# -- Modes and subclasses.


def test_make_wrapper_subclass_has_a_shape_and_no_memory():
    """Check lazy tensors. Without them guidance branches that are called one after the other cannot run on several
    ranks.
    """

    class Lazy(Tensor):
        __torch_function__ = internals.disabled_torch_function

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return torch.full((1,), 7.0)

    x = internals.make_wrapper_subclass(Lazy, (2, 3), dtype=torch.float64)
    assert (x.shape, x.dtype) == ((2, 3), torch.float64)
    assert (x + 1).tolist() == [7.0]


# -- Operators.


def test_called_kernel_is_seen_by_modes():
    """Check that modes see a called kernel. Otherwise the operators inside a custom operator are not counted."""
    names = []

    @torch.library.custom_op("para_core_tests::triple", mutates_args=())
    def triple(x: Tensor) -> Tensor:
        return x * 3

    class Opened(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            if func.namespace == "para_core_tests":
                with self:
                    return internals.call_kernel(func, "cpu", args, kwargs or {})
            return func(*args, **(kwargs or {}))

    with Opened():
        out = torch.ops.para_core_tests.triple(torch.ones(2))
    assert out.tolist() == [3.0, 3.0]
    assert names[-2:] == ["triple.default", "mul.Tensor"]


def test_adjust_crops_a_block_mask():
    """Check cropping of a BlockMask. Without it check_parallel cannot vary the length of a model that takes one."""
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 12, 12, device="cpu", BLOCK_SIZE=4)
    cropped = internals.crop_block_mask(mask, 11, 7)
    assert cropped.seq_lengths == (11, 7)
    expected = create_block_mask(mask.mask_mod, None, None, 11, 7, device="cpu", BLOCK_SIZE=4)
    assert torch.equal(cropped.to_dense(), expected.to_dense())


def test_fused_attention_functions_are_called_without_sdpa():
    """Check the fused attention functions. Without them, unseen attention would cover a rank's own tokens without an
    error.
    """
    assert len(internals.FUSED_ATTENTION_FUNCTIONS) == 6
    module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with Watch() as watch, torch.no_grad():
        torch._native_multi_head_attention(
            Q[0, :1],
            Q[0, :1],
            Q[0, :1],
            8,
            2,
            *module.in_proj_weight[None],
            module.in_proj_bias,
            *[module.out_proj.weight, module.out_proj.bias],
        )
    assert internals.FUSED_ATTENTION_FUNCTIONS[0] in watch.functions


def test_replaced_sdpa_is_recognized(monkeypatch):
    """Check that a replaced SDPA is recognized. Otherwise its model would run on each rank's own tokens without an
    error.
    """
    own = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args: None)
    assert internals.scaled_dot_product_attention is own


@pytest.mark.parametrize("function", internals.NORMALIZING_FUNCTIONS, ids=lambda function: function.__name__)
def test_private_softmax_functions_are_seen_by_modes(function):
    """Check the private softmax functions. Without them attention by hand that uses one would be computed without a
    warning.
    """
    arguments = {"_masked_softmax": (torch.zeros(2, 3, dtype=torch.bool), 1), "_safe_softmax": (-1,)}
    with Watch() as watch:
        function(torch.zeros(2, 3), *arguments.get(function.__name__, (-1, False)))
    assert function in watch.functions


# -- Autograd.


def test_checkpoint_hooks_lead_to_their_frame():
    """Check the hooks of a checkpoint. Without them it is not bound to the mode, and recomputes attention on a rank's
    own tokens.
    """
    frames = []

    def function(x):
        hooks = internals.top_saved_tensors_hooks(True)
        cells = [cell.cell_contents for cell in hooks[0].__closure__]
        frames.extend(cell for cell in cells if isinstance(cell, internals.CheckpointFrame))
        return x * 2

    checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert callable(frames[0].recompute_fn)
    assert internals.top_saved_tensors_hooks(True) is None


def test_marked_function_is_compiled_as_part_of_another_only():
    """Check marked functions. Otherwise a mode answers for another attribute of a tensor after a graph break."""
    compiling = []

    @internals.no_frame_of_its_own
    def marked(x):
        compiling.append(torch.compiler.is_compiling())
        return x + 1

    torch.compile(marked, backend="eager")(torch.zeros(1))
    torch.compile(lambda x: marked(x) * 2, backend="eager", fullgraph=True)(torch.zeros(1))
    assert compiling == [False, True]


def test_code_after_a_graph_break_knows_that_it_is_compiled():
    """Check code after a break. Otherwise same_bits=True runs compiled models, which nothing checks."""
    found = []

    def function(x):
        torch._dynamo.graph_break()
        found.append(internals.is_compiled_code())
        return x + 1

    torch.compile(function, backend="eager")(torch.zeros(1))
    function(torch.zeros(1))
    assert found == [True, False]


def test_all_hooks_are_listed_and_stay():
    """Check that all hooks are listed. Otherwise the checkpoints around the innermost one are not bound to the mode."""
    lists = []

    def function(x):
        lists.extend([internals.all_saved_tensors_hooks(), internals.all_saved_tensors_hooks()])
        return x * 2

    x = torch.ones(2, requires_grad=True)
    y = checkpoint(lambda x: checkpoint(function, x, use_reentrant=False), x, use_reentrant=False)
    assert len(lists[0]) == 2
    assert lists[0] == lists[1]
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((2,), 2.0))
    with torch.autograd.graph.disable_saved_tensors_hooks("none"):
        assert internals.all_saved_tensors_hooks() == []


# -- torch.func.


def test_transforms_of_torch_func():
    """Check transforms. Without them vmap, jvp and second derivatives over several ranks give wrong numbers instead of
    errors.
    """
    states = []

    def function(x):
        states.append((internals.innermost_transform().key(), internals.is_transform_tensor(x)))
        states.append((internals.is_grad_tracking_tensor(x), internals.unwrap_transform_tensor(x).shape))
        with internals.DisableTransforms():
            states.append(internals.is_transform_tensor(torch.ones(2) * 2))
        return x.sum()

    assert internals.innermost_transform() is None
    torch.func.vmap(function)(torch.ones(2, 3))
    assert states == [(internals.TransformType.Vmap, True), (False, (2, 3)), False]
    states.clear()
    torch.func.grad(function)(torch.ones(3))
    assert states == [(internals.TransformType.Grad, True), (True, (3,)), False]
    states.clear()
    torch.func.jvp(function, (torch.ones(3),), (torch.ones(3),))
    assert states[0] == (internals.TransformType.Jvp, True)


# -- torch.compile.


def test_tracing_context_and_trace_id_exist_while_tracing():
    """Check the tracing context. Without it a graph is taken for eager code: private classes compare equal, and the
    wrong trace holds switches.
    """
    states = []

    @torch.compiler.assume_constant_result
    def note():
        states.append((internals.TracingContext.try_get(), internals.CompileContext.current_trace_id()))
        return 1

    torch._dynamo.reset()
    torch.compile(lambda x: x + note(), backend="eager", fullgraph=True)(torch.ones(2))
    assert all(isinstance(context, internals.TracingContext) for context, _ in states)
    assert all(isinstance(trace, internals.TraceId) for _, trace in states)
    assert internals.TracingContext.try_get() is None and internals.CompileContext.current_trace_id() is None


def test_modes_can_be_entered_in_a_traced_branch():
    """Check that side effects are allowed. Otherwise torch.cond with a mode inside does not compile."""

    class Double(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def branch(x):
        with Double():
            return x * 2

    def function(x):
        def true(x):
            return internals.without_side_effect_checks(branch, x)

        return torch.cond(x.sum() > 0, true, lambda x: x + 1, (x,))

    torch._dynamo.reset()
    out = torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2))
    assert out.tolist() == [2.0, 2.0]


def test_nonstrict_trace_traces_operators():
    """Check nonstrict_trace. Without it the VAE over several ranks is no whole graph."""
    sizes = []

    @internals.nonstrict_trace
    def opaque(x):
        sizes.append(x.shape)  # Dynamo would refuse or forget this in a whole graph.
        return x * 3

    torch._dynamo.reset()
    out = torch.compile(lambda x: opaque(x) + 1, backend="aot_eager", fullgraph=True)(torch.ones(2))
    assert out.tolist() == [4.0, 4.0]


def test_attributes_of_compiled_modules():
    """Check the attributes. Without them compiled modules are taken for eager ones, and attention in their graphs is
    not intercepted.
    """
    module = nn.Linear(2, 2)
    assert getattr(module, internals.COMPILED_CALL) is None
    assert getattr(torch.compile(module, backend="eager"), internals.ORIGINAL_MODULE) is module
    module.compile(backend="eager", fullgraph=True)
    compiled = getattr(module, internals.COMPILED_CALL)
    assert internals.compile_context(compiled).fullgraph is True
    assert internals.compile_context(torch.compile(F.relu, backend="eager")).fullgraph is False
    assert internals.compile_context(F.relu) is None


def test_the_original_of_a_compiled_call_keeps_its_attributes():
    """Check the original call. Without it a module that was compiled before it became parallel runs twice, or without
    the plan.
    """

    def call(self, *args):
        return nn.Module._call_impl(self, *args)

    call.mark = "ours"
    module = type("Marked", (nn.Linear,), {internals.CALL_WITH_HOOKS: call})(2, 2)
    module.compile(backend="eager")
    original = getattr(getattr(module, internals.COMPILED_CALL), internals.ORIGINAL_CALLABLE)
    assert getattr(original, "__func__", original).mark == "ours"


# -- A dispatch key.


def test_spare_dispatch_key_exists_and_is_unused():
    """Check the spare key. Without it a mode intercepts attention, and the host time of a FLUX transformer grows by a
    third.
    """
    name = "TESTING_ONLY_GenericWrapper"
    key = internals.SpareDispatchKey(name, {("aten", "mul.Tensor"): lambda x, y: x})
    assert key.is_available()
    x = torch.full((2,), 3.0)
    with key.included():
        assert torch.equal(x * 2, x)
        with key.excluded():
            assert torch.equal(x * 2, x + x)
    assert torch._C._dispatch_get_registrations_for_dispatch_key(name) == ["aten::mul.Tensor"]
    assert torch._C._dispatch_has_backend_fallback(torch._C._dispatch_key_parse(name))
    assert torch._C._dispatch_key_parse("TESTING_ONLY_GenericMode") is not None
