"""A filled slot changes the calls of one instance, and nothing else of the instance or its class."""

import copy
import inspect
import itertools
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from para_core.instance.modules import ModuleTree
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_during, empty_slot, fill_during, fill_slot, filled_slots, is_filled
from para_core.instance.slots import Slot


class Greeter:
    def __init__(self):
        self.name = "x"

    def __call__(self, greeting="hello", *, mark="!"):
        """Return the greeting and the name."""
        return f"{greeting} {self.name}{mark}"


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return self.scale * x


ONE = torch.ones(())


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def twice(call, instance, /, *args, **kwargs):
    return 2 * call(instance, *args, **kwargs)


def plus_one(call, instance, /, *args, **kwargs):
    return call(instance, *args, **kwargs) + 1


def filled(cls, **slots):
    """Return an instance whose ``__call__`` runs these functions, by the names of slots."""
    instance = cls()
    for name, around in slots.items():
        fill_slot(instance, Slot[name], {"__call__": around})
    return instance


@pytest.mark.parametrize("cls", [Greeter, Scaled])
def test_private_class_looks_like_the_original(cls):
    plain, one, other = cls(), filled(cls, PLAN=twice), filled(cls, PLAN=plus_one)
    private = type(one)
    assert isinstance(one, cls) and original_class(one) is cls is one.__class__
    assert all(getattr(private, name) == getattr(cls, name) for name in ("__name__", "__qualname__", "__module__"))
    assert inspect.signature(one) == inspect.signature(plain)
    assert (one.__call__.__doc__, dir(one)) == (plain.__call__.__doc__, dir(plain))
    assert type(plain) is cls
    # It equals the original in lookups, and only ``is`` can tell, as docs/pipelines.md says.
    assert private is not cls and {cls: 1}[private] == 1 and private in (int, type(other)) and private not in (int, str)


def test_slots_run_in_the_order_of_the_table_and_the_last_removal_restores_the_class():
    for slots in (*itertools.permutations(list(Slot)[:6], 3), tuple(Slot), tuple(reversed(Slot))):
        one, ran = Greeter(), []

        def note(slot, call, instance, *args, ran=ran):
            ran.append(slot)
            return call(instance, *args)

        for slot in slots:
            fill_slot(one, slot, {"__call__": partial(note, slot)})
            assert is_filled(one, slot)
        assert one("hi") == "hi x!"
        assert ran == sorted(slots)
        for slot in slots:
            assert type(one) is not Greeter
            empty_slot(one, slot)
            assert not is_filled(one, slot)
        empty_slot(one, slots[0])  # Nothing is left to remove.
        assert type(one) is Greeter
        assert vars(one) == vars(Greeter())


def test_instances_run_their_own_slots_of_each_method():
    Replaced = type("Replaced", (Scaled,), {})
    first, second = Replaced(), filled(Replaced, CACHE=plus_one)
    fill_slot(first, Slot.PLAN, {"__call__": twice, "_call_impl": plus_one, "forward": twice})
    bound = first._call_impl
    assert (first(ONE), second(ONE)) == (2 * (2 * 3 + 1), 4)
    Replaced.forward = lambda self, x: 5 * x
    assert second(ONE) == 6
    assert torch.compile(second, backend="eager", fullgraph=True)(ONE) == 6
    # An earlier bound method follows the instance.
    fill_slot(first, Slot.PLAN, {"_call_impl": twice})
    assert bound(ONE) == 2 * 2 * 5
    final = type("Final", (Greeter,), {"__init_subclass__": None})()
    for instance, method, error in ((first, "missing", AttributeError), (final, "__call__", TypeError)):
        with pytest.raises(error):
            fill_slot(instance, Slot.CACHE, {method: twice})
        assert not is_filled(instance, Slot.CACHE)
    empty_slot(first, Slot.PLAN)
    assert bound(ONE) == 5


@pytest.mark.parametrize("cls", [Greeter, Scaled])
def test_copies_are_ordinary_objects_or_refused(cls):
    one, argument = cls(), (ONE,) if cls is Scaled else ()
    fill_slot(one, Slot.PARALLEL_PIPE, {"__call__": twice}, permits_copies=True)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert type(pickle.loads(pickle.dumps(one, protocol))) is cls
    assert type(copy.deepcopy(one)) is type(copy.copy(one)) is cls
    assert one(*argument) == 2 * cls()(*argument)
    # A copy would lose this slot.
    fill_slot(one, Slot.PLAN, {"__call__": twice})
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=rf"{cls.__name__}.*\(plan\)"):
            way(one)
    empty_slot(one, Slot.PLAN)
    assert type(copy.copy(one)) is cls


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("cls", [Scaled, lambda: Doubled(2, 2)])
def test_nested_slots_are_one_graph(cls):
    module, x = cls(), torch.ones(2)
    plain = module(x)
    fill_slot(module, Slot.PARALLEL_PIPE, {"__call__": twice})
    fill_slot(module, Slot.PLAN, {"__call__": plus_one})
    fill_slot(module, Slot.PLAN, {"_call_impl": plus_one})
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), 2 * (plain + 1 + 1))
    assert counter.frame_count == 1
    fill_slot(module, Slot.CACHED_BLOCK, {"__call__": twice})
    torch.testing.assert_close(compiled(x), 2 * (2 * (plain + 1) + 1))
    for slot in [Slot.PLAN, Slot.CACHED_BLOCK, Slot.PARALLEL_PIPE]:
        empty_slot(module, slot)
    torch.testing.assert_close(compiled(x), plain)


def test_another_class_that_is_assigned_keeps_the_slots():
    class Derived(Scaled):
        def forward(self, x):
            return 10 * super().forward(x)

    one, other = filled(Scaled, PARALLEL_PIPE=plus_one), filled(Scaled, PARALLEL_PIPE=twice)
    private = type(one)
    one.__class__ = Derived
    assert one.__class__ is original_class(one) is Derived
    assert type(one).__name__ == "Derived"
    assert (one(ONE), other(ONE)) == (31, 6)
    one.__class__ = one.__class__
    assert one(ONE) == 31
    empty_slot(one, Slot.PARALLEL_PIPE)
    assert type(one) is Derived
    # A user may have kept the private class, which has no slots of its own.
    one.__class__ = private
    assert one(ONE) == 3
    # A graph runs the slots too.
    assert torch.compile(other, backend="eager", fullgraph=True)(ONE) == 6


def test_block_restores_another_filling_and_leaves_a_first_one():
    one, plan, cache = filled(Greeter, PLAN=twice), (Slot.PLAN, ""), (Slot.CACHE, "")
    earlier = filled_slots(one)
    with fill_during(one, Slot.PLAN, {"__call__": plus_one, "__str__": twice}, owner="other"):
        assert filled_slots(one)[plan].owner == "other"
    assert dict(filled_slots(one)) == dict(earlier)
    with fill_during(one, Slot.CACHE, {"__call__": twice}, owner="first"):
        pass
    with fill_during(one, Slot.CACHE, {"__call__": twice}, owner="second"):
        assert filled_slots(one)[cache].owner == "second"
    assert filled_slots(one)[cache].owner == "first" and one("hi") == 2 * (2 * "hi x!")


def test_emptying_block_loses_what_it_fills():
    first, one = Greeter(), filled(Greeter, PLAN=twice)
    with empty_during([first, one]):
        assert type(one) is Greeter
        for instance in (first, one):
            fill_slot(instance, Slot.CACHE, {"__call__": twice})
    assert type(first) is Greeter and vars(first) == vars(Greeter())
    assert list(filled_slots(one)) == [(Slot.PLAN, "")]


def test_tree_sees_added_removed_replaced_and_compiled_modules():
    for change, compiles in [
        (lambda model: model[1].update({"b": nn.Linear(1, 1)}), False),
        (lambda model: model[1].update({"a": nn.Linear(1, 1)}), False),
        (lambda model: model[1].clear(), False),
        (lambda model: setattr(model, "0", nn.Identity()), False),
        (lambda model: model[1].update({"b": model[1].pop("a")}), False),
        (lambda model: model[1]["a"].compile(backend="eager"), True),
        (lambda model: model[1].update({"a": torch.compile(model[1]["a"], backend="eager")}), True),
        (lambda model: setattr(model[1]["a"], "forward", torch.compile(model[1]["a"].forward, backend="eager")), True),
        (lambda model: setattr(model[1]["a"], "forward", torch.compiler.disable(model[1]["a"].forward)), False),
        (lambda model: model[1].update({"a": torch.compiler.disable(model[1]["a"])}), False),
    ]:
        model = nn.Sequential(nn.Linear(1, 1), nn.ModuleDict({"a": nn.Linear(1, 1)}))
        tree = ModuleTree(model)
        assert tree.is_unchanged() and not tree.has_compiled_parts()
        change(model)
        assert not tree.is_unchanged() or tree.has_compiled_parts() == compiles
        assert ModuleTree(model).has_compiled_parts() == compiles
