"""Convert the plans that diffusers publishes in its models (``_cp_plan``).

Called for a model without an adapter (``adapters/registry.py``), and by :mod:`.apply` and
:mod:`para_core.verify.check` for a plan that a user passes in this form. Tests: tests/plans/test_plan.py,
tests/plans/test_context_parallel.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from para_core.plans.plan import Attention, Gather, Plan, ShardRule, Split

# Parameter names of the token streams in diffusers models that publish a plan, in the order of their joint attention,
# text first. The segments get the same names.
_PUBLISHED_STREAMS = ("encoder_hidden_states", "hidden_states")


def convert_published_plan(cp_plan: Mapping[str, Any]) -> Plan:
    """Return a :class:`Plan` that is equivalent to a diffusers ``_cp_plan``.

    The segments are ``hidden_states`` and ``encoder_hidden_states``; if the plan does not split one of the
    two, it is replicated. As everywhere in diffusers, a module named ``attn1`` is self-attention over
    ``hidden_states``, ``attn2`` is cross-attention from ``hidden_states`` to ``encoder_hidden_states``, and
    any other attends to both jointly.

    Raises:
        TypeError: ``cp_plan`` is no mapping.
        ValueError: The plan does not split ``hidden_states``, gathers no output, or has an entry of an
            unknown kind.
    """
    if not isinstance(cp_plan, Mapping):
        raise TypeError(
            f"plan is a {type(cp_plan).__name__}; expected a Plan, or a mapping like the _cp_plan of a diffusers model."
        )
    inner: dict[str, dict[str | int, ShardRule]] = {}
    outputs: dict[str, Sequence[Gather | None]] = {}
    for name, entry in cp_plan.items():
        if isinstance(entry, Mapping):
            inner[name] = {key: _convert_split(name, key, value) for key, value in entry.items()}
        else:
            entries = [entry]
            if isinstance(entry, (list, tuple)):
                entries = list(entry)
            outputs[name] = tuple(_convert_gather(name, value) for value in entries)
    of_model = inner.pop("", {})
    inputs = {key: split for key, split in of_model.items() if isinstance(key, str)}
    later = {key: split for key, split in of_model.items() if isinstance(key, int)}
    if later:
        raise ValueError(
            f"the plan splits outputs {sorted(later)} of the model itself; expected only inputs there."
        )
    attention = {
        "**.attn1": (Attention(("hidden_states",)),),
        "**.attn2": (Attention(("hidden_states",), ("encoder_hidden_states",)),),
    }
    plan = Plan(inputs, outputs, _PUBLISHED_STREAMS, inner, attention)
    gathers = [gather for entries in outputs.values() for gather in entries if gather is not None]
    if not (plan.splits("hidden_states") and gathers):
        raise ValueError(f"a plan must split 'hidden_states' and gather an output; got {dict(cp_plan)}.")
    return plan


def _convert_gather(module: str, value: Any) -> Gather | None:
    """Convert a ``ContextParallelOutput`` of diffusers; None leaves the output as it is."""
    if value is None:
        return None
    return Gather(_attribute(module, value, "gather_dim"), "hidden_states")


def _convert_split(module: str, key: str | int, value: Any) -> Split:
    """Convert a ``ContextParallelInput`` of diffusers, the entry ``key`` of ``module``."""
    if isinstance(value, (list, tuple)):
        raise ValueError(
            f"plan entry {module!r}[{key!r}] splits a list of tensors one by one; expected one split."
        )
    if isinstance(key, int) != bool(_attribute(module, value, "split_output")):
        raise ValueError(
            f"plan entry {module!r}[{key!r}]: an output is named by its index and has split_output=True, an input by "
            f"its parameter and split_output=False; got {value}."
        )
    segment = None
    if isinstance(key, str) and key in _PUBLISHED_STREAMS:
        segment = key
    return Split(
        _attribute(module, value, "split_dim"), segment, ndim=_attribute(module, value, "expected_dims")
    )


def _attribute(module: str, value: Any, name: str) -> Any:
    if not hasattr(value, name):
        raise ValueError(f"plan entry {module!r} is {value!r}; expected something with {name!r}.")
    return getattr(value, name)
