"""Options declared as annotated fields: their checks, and the signature and docstring that follow from them."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from para_core.adapters import parallelize_pipe, parallelize_transformer
from para_core.adapters.parallel.options import ParallelOptions, TransformerOptions
from para_core.declared_options import Option, check_options, check_values, declarations, takes_options, values_of


@dataclass(frozen=True, kw_only=True)
class Base:
    place: Annotated[Literal["host", "device"] | None, Option(30, "Where it is. It moves.", none="to keep it")] = None


@dataclass(frozen=True, kw_only=True)
class Example(Base):
    steps: Annotated[int, Option(10, "How many.", at_least=1, at_most=9)] = 2
    share: Annotated[float | None, Option(20, expected="a share", at_least=0.0)] = None
    exact: Annotated[bool, Option(40)] = True
    compute: Annotated[Callable[..., Any] | None, Option(50, expected="a function")] = None
    rule: Annotated[Literal["mean"] | Base, Option(60)] = "mean"
    call: Annotated[Callable[..., Any], Option(65)] = print
    free: Annotated[int, Option(70, is_checked=False)] = 0
    undeclared: int = 0


def test_values_of_the_type_are_accepted():
    check_options(Example(place="host", steps=9, share=1, compute=print, rule=Base(), free="x"))
    check_options(Example(share=0.5, steps=1))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"place": "moon"}, ValueError, "place is 'moon'; expected 'host', 'device', or None to keep it."),
        ({"place": np.arange(2)}, ValueError, "place is array([0, 1]); expected 'host', 'device', or None to keep it."),
        ({"steps": None}, TypeError, "steps is None; expected an integer."),
        ({"steps": 2.0}, TypeError, "steps is 2.0; expected an integer."),
        ({"steps": 10}, ValueError, "steps is 10; expected at least 1 and at most 9."),
        ({"share": float("nan")}, TypeError, "share is nan; expected a share, or None."),
        ({"share": True}, TypeError, "share is True; expected a share, or None."),
        ({"share": -1}, ValueError, "share is -1; expected at least 0.0."),
        ({"exact": 1}, TypeError, "exact is 1; expected True or False."),
        ({"compute": 5}, TypeError, "compute is 5; expected a function, or None."),
        ({"call": 5}, TypeError, "call is 5; expected a function."),
        ({"rule": "median"}, ValueError, "rule is 'median'; expected 'mean' or a Base."),
        ({"rule": 5}, TypeError, "rule is 5; expected 'mean' or a Base."),
    ],
)
def test_other_values_raise_with_what_is_expected(values, error, message):
    with pytest.raises(error) as caught:
        check_options(Example(**values))
    assert str(caught.value) == message


@takes_options(Example)
def run(pipe, options):
    """Run.

    Args:
        {options}

    Returns:
        It.
    """
    return pipe, options


NAMES = ["steps", "share", "place", "exact", "compute", "rule", "call", "free"]


def test_names_are_sorted_by_number_and_listed_without_quotes():
    assert [declaration.name for declaration in declarations(Example)] == NAMES
    assert values_of(Example(place="host", steps=3), Base) == {"place": "host"}
    check_values(Example(place="host", rule=5))
    for values, message in (
        ({"place": "moon"}, "place is 'moon'; expected one of host, device."),
        ({"steps": 0}, "steps is 0; expected at least 1 and at most 9."),
        ({"share": float("nan")}, "share is nan; expected at least 0.0."),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            check_values(Example(**values))
    made = make_dataclass("Made", [("steps", Annotated[list, Option(10)], field(default_factory=list))])
    with pytest.raises(TypeError, match=r"Made\.steps has a default_factory"):
        declarations(made)


def test_fields_are_the_keyword_arguments_of_a_function():
    assert run(5, steps=3) == (5, Example(steps=3))
    assert run(pipe=5) == (5, Example())
    parameters = inspect.signature(run).parameters
    assert list(parameters) == ["pipe", *NAMES]
    assert (parameters["steps"].kind, parameters["steps"].default) == (inspect.Parameter.KEYWORD_ONLY, 2)
    assert parameters["place"].annotation == "Literal['host', 'device'] | None"
    for arguments, options in (((), {}), ((1, 2), {}), ((1,), {"stepz": 3}), ((1,), {"undeclared": 3})):
        with pytest.raises(TypeError):
            run(*arguments, **options)
    assert '    place (`"host"` or `"device"`, *optional*): Where it is. It moves.\n' in run.__doc__
    assert "    steps (`int`, defaults to `2`): How many.\n" in run.__doc__
    assert run.__doc__.index("steps (") < run.__doc__.index("place (") < run.__doc__.index("Returns:")


def test_every_option_of_a_public_function_is_explained():
    for function, options in ((parallelize_pipe, ParallelOptions), (parallelize_transformer, TransformerOptions)):
        names = [declaration.name for declaration in declarations(options)]
        assert list(inspect.signature(function).parameters)[1:] == names
        assert all(f"{name} (" in function.__doc__ for name in names)
