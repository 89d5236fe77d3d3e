"""A filled slot changes the calls of one instance, and nothing else of the instance or its class."""

import copy
import inspect
import itertools
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from para_core.instance.modules import has_compiled_parts
from para_core.instance.private_class import original_class
from para_core.instance.record import emptied_during, empty_slot, fill_slot, is_filled, restored_on_failure, slot_owner
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


def twice(call, instance, /, *args, **kwargs):
    return 2 * call(instance, *args, **kwargs)


def plus_one(call, instance, /, *args, **kwargs):
    return call(instance, *args, **kwargs) + 1


def test_only_the_filled_instance_changes():
    filled, other = Greeter(), Greeter()
    fill_slot(filled, Slot.PARALLEL_PIPE, {"__call__": twice})
    assert filled() == "hello x!hello x!"
    assert other() == "hello x!"
    assert type(other) is Greeter
    empty_slot(filled, Slot.PARALLEL_PIPE)
    assert type(filled) is Greeter
    assert vars(filled) == vars(other)


def test_private_class_keeps_name_signature_and_doc():
    filled = Greeter()
    fill_slot(filled, Slot.PARALLEL_PIPE, {"__call__": twice})
    cls = type(filled)
    assert isinstance(filled, Greeter)
    assert (cls.__name__, cls.__qualname__, cls.__module__) == ("Greeter", "Greeter", Greeter.__module__)
    assert inspect.signature(filled) == inspect.signature(Greeter())
    assert filled.__call__.__doc__ == "Return the greeting and the name."
    assert original_class(filled) is Greeter


def test_private_class_equals_original_in_lookups():
    filled, other = Greeter(), Greeter()
    fill_slot(filled, Slot.PARALLEL_PIPE, {"__call__": twice})
    fill_slot(other, Slot.PARALLEL_PIPE, {"__call__": plus_one})
    assert type(filled) in (int, Greeter)
    assert type(filled) in {Greeter}
    assert {Greeter: 1}[type(filled)] == 1
    assert type(filled) in (type(other),)
    assert type(filled) not in (int, str)
    assert type(filled) is not Greeter


def test_last_removal_restores_the_class():
    filled = Scaled()
    fill_slot(filled, Slot.PARALLEL_PIPE, {"__call__": twice})
    fill_slot(filled, Slot.PLAN, {"__call__": plus_one})
    x = torch.ones(())
    assert filled(x) == 2 * (3 + 1)
    empty_slot(filled, Slot.PARALLEL_PIPE)
    assert filled(x) == 3 + 1
    fill_slot(filled, Slot.PLAN, {"__call__": twice})
    assert filled(x) == 2 * 3
    assert is_filled(filled, Slot.PLAN)
    assert not is_filled(filled, Slot.PARALLEL_PIPE)
    empty_slot(filled, Slot.PLAN)
    assert type(filled) is Scaled
    empty_slot(filled, Slot.PLAN)  # Nothing is left to remove.


def test_slots_run_in_the_order_of_the_table():
    for slots in (*itertools.permutations(list(Slot)[:6], 3), tuple(Slot), tuple(reversed(Slot))):
        filled, ran = Greeter(), []

        def note(slot, call, instance, *args, ran=ran):
            ran.append(slot)
            return call(instance, *args)

        for slot in slots:
            fill_slot(filled, slot, {"__call__": partial(note, slot)})
        assert filled("hi") == "hi x!"
        assert ran == sorted(slots)


def test_each_filled_slot_is_one_frame():
    class Deep:
        def __call__(self):
            return len(inspect.stack())

    filled = Deep()
    plain = filled()
    for count, slot in enumerate(Slot, start=1):
        fill_slot(filled, slot, {"__call__": lambda call, instance: call(instance)})
        assert filled() - plain == count + 1


def test_fillings_with_names_share_a_slot():
    filled = Greeter()
    fill_slot(filled, Slot.CACHE, {"__call__": twice}, owner="first", name="1")
    fill_slot(filled, Slot.CACHE, {"__call__": twice}, owner="second", name="2")
    assert filled("hi") == 4 * "hi x!"
    assert slot_owner(filled, Slot.CACHE, str, "2") == "second"
    assert slot_owner(filled, Slot.CACHE, int, "2") is slot_owner(filled, Slot.CACHE, str) is None
    empty_slot(filled, Slot.CACHE, "1")
    assert filled("hi") == 2 * "hi x!"


def test_failure_restores_slots_and_owners():
    filled, plain = Greeter(), Greeter()
    fill_slot(filled, Slot.PLAN, {"__call__": twice}, owner="plan")
    with pytest.raises(KeyError), restored_on_failure([filled, plain]):
        empty_slot(filled, Slot.PLAN)
        fill_slot(plain, Slot.CACHE, {"__call__": twice})
        raise KeyError
    assert slot_owner(filled, Slot.PLAN, str) == "plan"
    assert (filled("hi"), plain("hi")) == (2 * "hi x!", "hi x!")
    assert type(plain) is Greeter


def test_slots_that_are_kept_stay_filled():
    filled = Greeter()
    fill_slot(filled, Slot.PLAN, {"__call__": twice})
    fill_slot(filled, Slot.CACHE, {"__call__": twice})
    with emptied_during([filled], keep={Slot.CACHE}):
        assert filled("hi") == 2 * "hi x!"
    with emptied_during([filled]):
        assert type(filled) is Greeter
    assert filled("hi") == 4 * "hi x!"


def test_arguments_may_have_the_names_that_slots_use():
    class Given:
        def __call__(self, **kwargs):
            return kwargs

    filled = Given()

    def around(call, instance, /, **kwargs):
        return call(instance, **kwargs)

    fill_slot(filled, Slot.PARALLEL_PIPE, {"__call__": around})
    fill_slot(filled, Slot.PLAN, {"__call__": around})
    assert filled(call=1, instance=2, self_=3) == {"call": 1, "instance": 2, "self_": 3}


def test_earlier_bound_method_follows_the_instance():
    filled = Scaled()
    fill_slot(filled, Slot.PARALLEL_PIPE, {"_call_impl": twice})
    kept = filled._call_impl
    fill_slot(filled, Slot.PARALLEL_PIPE, {"_call_impl": plus_one})
    assert kept(torch.ones(())) == 4
    empty_slot(filled, Slot.PARALLEL_PIPE)
    assert kept(torch.ones(())) == 3


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("cls", [Greeter, Scaled])
def test_pickles_and_copies_are_ordinary_objects(cls, protocol):
    filled = cls()
    fill_slot(filled, Slot.PARALLEL_PIPE, {"__call__": twice}, permits_copies=True)
    for other in (pickle.loads(pickle.dumps(filled, protocol)), copy.deepcopy(filled), copy.copy(filled)):
        assert type(other) is cls
    argument = (torch.ones(()),) if cls is Scaled else ()
    assert filled(*argument) == 2 * cls()(*argument)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("cls", [Greeter, Scaled])
def test_a_copy_that_would_lose_a_slot_is_refused(cls, way):
    filled = cls()
    fill_slot(filled, Slot.PLAN, {"__call__": twice})
    fill_slot(filled, Slot.CACHE, {"__call__": plus_one}, permits_copies=True)
    with pytest.raises(TypeError, match=rf"{cls.__name__}.*\(plan\)"):
        way(filled)
    empty_slot(filled, Slot.PLAN)
    assert way(filled)


def test_removing_nothing_keeps_the_class():
    layer = nn.Linear(2, 2)
    fill_slot(layer, Slot.PLAN, {"__call__": lambda call, instance, *args, **kwargs: call(instance, *args, **kwargs)})
    cls = type(layer)
    empty_slot(layer, Slot.CACHE)
    assert type(layer) is cls


def test_compiled_parts_are_found():
    def build():
        return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))

    assert not has_compiled_parts(build())
    in_place, replaced, forward_alone = build(), build(), build()
    in_place[1][0].compile(backend="eager")
    replaced[1][1] = torch.compile(replaced[1][1], backend="eager")
    forward_alone[0].forward = torch.compile(forward_alone[0].forward, backend="eager")
    for module in (in_place, replaced, forward_alone, torch.compile(build(), backend="eager")):
        assert has_compiled_parts(module)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_inherited_super_is_found_in_a_graph():
    module, x = Doubled(3, 3), torch.ones(2, 3)
    expected = module(x)
    fill_slot(
        module, Slot.PLAN, {"__call__": lambda call, instance, *args, **kwargs: call(instance, *args, **kwargs) + 1}
    )
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected + 1)


def test_nested_slots_are_one_graph():
    module, x = Scaled(), torch.ones(2)
    fill_slot(module, Slot.PARALLEL_PIPE, {"__call__": twice})
    fill_slot(module, Slot.PLAN, {"__call__": plus_one})
    fill_slot(module, Slot.PLAN, {"_call_impl": plus_one})
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), 2 * (3 * x + 1 + 1))
    assert len(graphs) == 1
    fill_slot(module, Slot.CACHED_BLOCK, {"__call__": twice})
    torch.testing.assert_close(compiled(x), 2 * (2 * (3 * x + 1) + 1))
    for slot in [Slot.PLAN, Slot.CACHED_BLOCK, Slot.PARALLEL_PIPE]:
        empty_slot(module, slot)
    torch.testing.assert_close(compiled(x), 3 * x)


def test_dir_of_a_filled_instance_is_unchanged():
    greeter, scaled = Greeter(), Scaled()
    before = dir(greeter), dir(scaled)
    fill_slot(greeter, Slot.PLAN, {"__call__": twice})
    fill_slot(scaled, Slot.PLAN, {"forward": plus_one})
    assert (dir(greeter), dir(scaled)) == before
    # The private class is another object, and only ``is`` can tell, as docs/pipelines.md says.
    assert type(greeter) is not Greeter
    assert type(greeter) == Greeter  # noqa: E721
    assert isinstance(greeter, Greeter)


def test_another_class_that_is_assigned_keeps_the_slots():
    class Derived(Scaled):
        def forward(self, x):
            return 10 * super().forward(x)

    filled, other, x = Scaled(), Scaled(), torch.ones(())
    fill_slot(filled, Slot.PARALLEL_PIPE, {"__call__": plus_one})
    fill_slot(other, Slot.PARALLEL_PIPE, {"__call__": twice})
    assert filled.__class__ is Scaled
    private = type(filled)
    filled.__class__ = Derived
    assert filled.__class__ is original_class(filled) is Derived
    assert type(filled).__name__ == "Derived"
    assert (filled(x), other(x)) == (31, 6)
    filled.__class__ = filled.__class__
    assert filled(x) == 31
    empty_slot(filled, Slot.PARALLEL_PIPE)
    assert type(filled) is Derived
    assert filled(x) == 30
    # A user may have kept the private class, which has no slots of its own.
    filled.__class__ = private
    assert filled(x) == 3
    # A graph runs the slots too.
    assert torch.compile(other, backend="eager", fullgraph=True)(x) == 6


def test_class_derived_from_a_filled_instance_is_not_shared():
    """Check a class derived from a filled instance. FSDP2 and parametrizations derive one for each class in a table,
    and assign it.
    """
    table = {}

    def derive(instance):
        cls = instance.__class__
        if cls not in table:
            table[cls] = type(f"My{cls.__name__}", (cls,), {})
        instance.__class__ = table[cls]

    first, second, plain, x = Scaled(), Scaled(), Scaled(), torch.ones(())
    fill_slot(first, Slot.PARALLEL_PIPE, {"__call__": twice})
    derive(first)
    derive(second)
    derive(plain)
    fill_slot(second, Slot.PARALLEL_PIPE, {"__call__": plus_one})
    assert (first(x), second(x), plain(x)) == (6, 4, 3)
    assert list(map(type, table)) == [type]
    empty_slot(first, Slot.PARALLEL_PIPE)
    assert type(first) is type(plain)


def test_parametrization_goes_on_and_off_a_filled_module():
    module, x = nn.Linear(3, 3), torch.ones(2, 3)
    fill_slot(module, Slot.PARALLEL_PIPE, {"__call__": twice})
    expected = module(x)
    orthogonal = nn.utils.parametrizations.weight_norm(module)
    torch.testing.assert_close(orthogonal(x), expected)
    nn.utils.parametrize.remove_parametrizations(module, "weight")
    torch.testing.assert_close(module(x), expected)
    empty_slot(module, Slot.PARALLEL_PIPE)
    assert type(module) is nn.Linear
    torch.testing.assert_close(2 * module(x), expected)
