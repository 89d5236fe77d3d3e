"""A canary for each private name of torch, which fails if a version of torch lacks or changes the name.

Run it with each supported torch: 2.11, 2.13, 2.15. Each test uses the name as para_core does, in one process.
"""

import ast
import logging
import re
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import para_core
from para_core import torch_internals as internals

ROOT = Path(para_core.__file__).parents[1]
Q = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")
FOLDERS = ("para_core", "adapters", "fleet", "cli", "kernels", "cache_examples", "parallel_examples")
# torch offers no other spelling for these attributes, and they are written as often as read.
ATTRIBUTE = re.compile(
    "_(base|buffers|call_impl|cdata|compiled_call_impl|device_types|forward_(pre_)?hooks|get_backend|"
    "load_state_dict_post_hooks|orig_mod|schema|torchdynamo_orig_callable|version)"
)


def private_names(source):
    """Return the private names of torch that a module uses: imports, attributes of what it imported, and ATTRIBUTE."""
    tree, imported, names = ast.parse(source), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = [(x.asname or x.name.split(".")[0], x.name if x.asname else "torch", x.name) for x in node.names]
        elif isinstance(node, ast.ImportFrom):
            paths = [(x.asname or x.name, f"{node.module}.{x.name}", f"{node.module}.{x.name}") for x in node.names]
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
        names |= {part for part in parts if ATTRIBUTE.fullmatch(part)}
        if isinstance(node, ast.Name) and node.id in imported:
            path = ".".join([imported[node.id], *reversed(parts)])
            names |= {path for part in parts if part.startswith("_") and not part.startswith("__")}
    return names


def test_no_other_module_uses_a_private_name_of_torch():
    found = {}
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        source = path.read_text()
        found[str(path.relative_to(ROOT))] = private_names(source)
        # No module patches, and none calls C.
        assert not {"unittest", "mock", "ctypes"} & {
            name.split(".")[0]
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (getattr(node, "module", None) or "", *(alias.name for alias in node.names))
        }, path
    assert len(found.pop("para_core/torch_internals.py")) > 50
    assert {name: used for name, used in found.items() if used} == {}
    # Importing it needs no FSDP and no Inductor.
    lines = re.findall("^(?:from|import) .*", (ROOT / "para_core/torch_internals.py").read_text(), re.MULTILINE)
    assert lines and not re.search("fsdp|_inductor|_composable", " ".join(lines))


class Watch(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


# -- Names whose change no other test would notice or explain. Each row says what happens without the name.


def functions_seen(call):
    """Return the functions that a mode sees in ``call``."""
    with Watch() as watch:
        call()
    return watch.functions


def modes_are_off():
    with Watch() as watch:
        with internals.DisableTorchFunction():
            Q + 1
        unseen = not watch.functions
        with internals.DisableTorchFunctionSubclass():
            Q + 1
    return unseen and len(watch.functions) == 1


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


BEGIN, END = ["query", "key", "value"], ["dropout_p", "is_causal"]
ARGUMENTS = {
    "flash_attention": [*BEGIN, *END, "return_debug_mask", "scale"],
    "efficient_attention": [*BEGIN, "attn_bias", "compute_log_sumexp", *END, "scale"],
    "cudnn_attention": [*BEGIN, "attn_bias", "compute_log_sumexp", *END, "return_debug_mask", "scale"],
}


def operators_of_a_gpu_take_these_arguments():
    for operator, arguments in ARGUMENTS.items():
        forward = internals.schema_of(getattr(internals, operator)).arguments
        backward = internals.schema_of(getattr(internals, f"{operator}_backward")).arguments
        if [x.name for x in forward] != arguments or [x.name for x in backward][1:4] != BEGIN:
            return False
    return True


def autocast_is_seen():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return internals.is_any_autocast_enabled()


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


def fused_attention_is_called_without_sdpa():
    module, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), Q[0, :1]
    project, out = (module.in_proj_weight, module.in_proj_bias), (module.out_proj.weight, module.out_proj.bias)
    with torch.no_grad():
        seen = functions_seen(lambda: torch._native_multi_head_attention(x, x, x, 8, 2, *project, *out))
    return len(internals.FUSED_ATTENTION_FUNCTIONS) == 6 and internals.FUSED_ATTENTION_FUNCTIONS[0] in seen


def replaced_sdpa_is_recognized():
    own = F.scaled_dot_product_attention
    with mock.patch.object(F, "scaled_dot_product_attention", lambda *args: None):
        return internals.scaled_dot_product_attention is own


def private_softmax_functions_are_seen_by_modes():
    x = torch.zeros(2, 3)
    arguments = {"_masked_softmax": (x > 0, 1), "_safe_softmax": (-1,)}
    return len(internals.NORMALIZING_FUNCTIONS) == 4 and all(
        function in functions_seen(lambda f=function: f(x, *arguments.get(f.__name__, (-1, False))))
        for function in internals.NORMALIZING_FUNCTIONS
    )


def marked_function_is_compiled_as_part_of_another_only():
    torch._dynamo.reset()
    compiling = []

    @internals.no_frame_of_its_own
    def marked(x):
        compiling.append(torch.compiler.is_compiling())
        return x + 1

    torch.compile(marked, backend="eager")(torch.zeros(1))
    torch.compile(lambda x: marked(x) * 2, backend="eager", fullgraph=True)(torch.zeros(1))
    return compiling == [False, True]


def hooks_can_be_off():
    with torch.autograd.graph.disable_saved_tensors_hooks("none"):
        return internals.all_saved_tensors_hooks() == []


def dispatch_modes_are_counted():
    with internals.FakeTensorMode():
        return internals.num_dispatch_modes() == 1


CANARIES = {
    "collectives in a graph lose their order": lambda: internals.WAIT_TENSOR.name() == "_c10d_functional::wait_tensor",
    "para_core's modes would intercept its own operators": modes_are_off,
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
    "ring attention on a GPU has no backend": operators_of_a_gpu_take_these_arguments,
    "ring attention in autocast merges in another dtype than torch computes": lambda: (
        autocast_is_seen() and not internals.is_any_autocast_enabled()
    ),
    "a reentrant checkpoint is not bound to the mode, and recomputes another function": lambda: (
        internals.set_grad_enabled in functions_seen(torch.no_grad()(lambda: None))
    ),
    "tangents of attention over several ranks would be lost without an error": level_of_forward_ad,
    "a mask or condition that is changed in place is taken for the earlier one": version_counts,
    "the mask is reviewed again for each layer's view": owner_of_a_view_is_known,
    "the planner counts the memory of views twice": storages_differ,
    "unseen attention covers a rank's own tokens without an error": fused_attention_is_called_without_sdpa,
    "a model with its own SDPA runs on each rank's own tokens without an error": replaced_sdpa_is_recognized,
    "attention by hand is computed without a warning": private_softmax_functions_are_seen_by_modes,
    "a mode answers for another tensor after a graph break": marked_function_is_compiled_as_part_of_another_only,
    "attention where saved-tensor hooks are not allowed raises": hooks_can_be_off,
    "the planner counts each operator inside a merge as a launch": dispatch_modes_are_counted,
}


@pytest.mark.parametrize("without", CANARIES)
def test_name_is_as_it_was(without):
    assert CANARIES[without](), f"{without}, because torch changed the name"


@pytest.fixture
def world(tmp_path):
    """Create a default group of this process alone."""
    if dist.is_initialized():
        pytest.fail("another test left a process group")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_groups_are_listed_named_and_aborted(world):
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


def test_new_group_has_a_name_a_timeout_and_devices(world):
    timeout = timedelta(seconds=7)
    group = internals.new_process_group("a name", [0], description="a description", timeout=timeout)
    assert (group.group_name, group.group_desc) == ("a name", "a description")
    assert (group.rank(), group.size(), dist.get_process_group_ranks(group)) == (0, 1, [0])
    assert internals.group_timeout(group) == internals.group_timeout(group, CPU) == timeout
    internals.set_group_timeout(group, timedelta(seconds=9))
    assert internals.group_timeout(group, CPU) == timedelta(seconds=9)
    default = internals.new_process_group("another name", [0], description="")
    assert internals.group_timeout(default) == internals.group_timeout(dist.new_group([0]))
    assert dist.get_backend(group) == "gloo"
    dist.all_reduce(x := torch.ones(2), group=group)
    assert x.tolist() == [1.0, 1.0]
    assert internals.group_named("a name") is group
    with pytest.raises(ValueError):  # torch accepts a name once.
        internals.new_process_group("a name", [0], description="another")
    of_both = dist.new_group([0], backend="cpu:gloo,cuda:gloo")
    assert {device.type for device in internals.group_devices(of_both)} == {"cpu", "cuda"}
    assert internals.backend_of(of_both, CPU).name() == "gloo"
    with pytest.raises(RuntimeError):
        internals.backend_of(dist.new_group([0], backend="cpu:gloo"), torch.device("cuda"))


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "fake", "cpu:gloo,cuda:gloo"])
def test_backend_config_reads_the_backends_of_a_group(world, backend):
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    # An NCCL group of some ranks would be split from the default one, which hangs.
    assert internals._nccl_options_without_split(backend, timedelta(seconds=1)) is None
    group = internals.new_process_group("of " + backend, [0], description="", backend=backend)
    assert dist.get_backend(group) is not None


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")
def test_nccl_has_group_start_and_options_to_split():
    assert hasattr(dist.ProcessGroupNCCL, "_group_start") and hasattr(dist.ProcessGroupNCCL, "_group_end")
    options = internals._nccl_options_without_split("cpu:gloo,cuda:nccl", timedelta(seconds=3))
    options.split_from = "the default group"
    assert dist.ProcessGroupNCCL.Options.split_from.__get__(options) is None
    assert options._timeout == timedelta(seconds=3)
