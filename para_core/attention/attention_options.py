"""The options of attention over a mesh that do not depend on a call's tensors.

The modes, plans and adapters make the value, and :class:`~para_core.attention.spec.AttentionSpec` keeps it.
What an optional option changes is asked of its value (:mod:`.option`), so no option is named here. Tests:
tests/adapters/test_attention_options.py and tests/adapters/test_refused_options.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from para_core.attention.features import OPTIONS, OPTIONS_OF_STEPS, load
from para_core.attention.option import AttentionOption
from para_core.attention.wire import AS_IT_IS, Wire
from para_core.dataclass_json import from_json, to_json
from para_core.option_values import BACKENDS, EXACT_FORM, ROTATE_METHODS, Backend, RotateMethod

# The class of the values of each optional option, by the name of the option.
_KINDS: dict[str, type[AttentionOption]] = {
    kind.option: kind for kind in map(load, (*OPTIONS, *OPTIONS_OF_STEPS.values()))
}


@dataclass(frozen=True)
class AttnOptions:
    """The options of attention over a mesh. Attention modes, plans and functions such as
    ``unified_attention`` take them as keyword arguments, see :meth:`of`.

    Args:
        rotate_method, backend: As :class:`~para_core.modes.unified.UnifiedAttnMode` describes them.
        others: The values of the optional options that are set, in the order in which :mod:`.features` lists
            them, so that equal options have equal JSON.

    Raises:
        ValueError: A value is unknown, or two options exclude each other.
        TypeError: ``backend`` is neither a string nor None.
    """

    rotate_method: RotateMethod = "alltoall"
    backend: Backend | None = None
    others: tuple[AttentionOption, ...] = ()

    def __post_init__(self) -> None:
        if self.rotate_method not in ROTATE_METHODS:
            expected = ", ".join(map(repr, ROTATE_METHODS))
            raise ValueError(f"rotate_method is {self.rotate_method!r}; expected one of {expected}.")
        for other in self.others:
            other.check_method(self.rotate_method)
        by_position = [other.option for other in self.others if other.by_position]
        if len(by_position) > 1:
            raise ValueError(
                f"{' and '.join(by_position)} each decide which keys a query sees, and none knows of the other; "
                "expected one of them at most."
            )
        if not (self.backend is None or isinstance(self.backend, str)):
            raise TypeError(
                f"backend is {self.backend!r}; expected a name. An AttentionSchedule is for parallelize_pipe, which "
                "knows the steps."
            )
        if self.backend not in (None, *BACKENDS):
            raise ValueError(f"backend is {self.backend!r}; expected one of {', '.join(BACKENDS)}, or None.")

    @staticmethod
    def of(
        *, rotate_method: RotateMethod = "alltoall", backend: Backend | None = None, **others: Any
    ) -> AttnOptions:
        """Return the options with these values. ``others`` are those of optional features; None leaves one
        out.

        >>> AttnOptions.of(rotate_method="allgather").as_text()
        '{"rotate_method": "allgather", "backend": null, "others": {}}'

        Raises:
            TypeError: There is no such option, or a value has a wrong type.
            ValueError: A value is unknown, or two options exclude each other.
        """
        for name in others:
            if name not in _KINDS:
                names = ", ".join(["rotate_method", "backend", *_KINDS])
                raise TypeError(f"attention has no option {name!r}; expected one of {names}.")
        values = [kind.read(others[name]) for name, kind in _KINDS.items() if others.get(name) is not None]
        return AttnOptions(rotate_method, backend, tuple(values))

    def with_option(self, value: AttentionOption) -> AttnOptions:
        """Return these options with ``value`` in addition, or in place of the value that its option has."""
        values = {**{other.option: other for other in self.others}, value.option: value}
        return replace(self, others=tuple([values[name] for name in _KINDS if name in values]))

    @property
    def by_position(self) -> bool:
        """Whether one of the options lets the positions of tokens decide which keys a query sees.
        :attr:`AttentionOption.by_position` says what follows from that.
        """
        return any(other.by_position for other in self.others)

    @property
    def wire(self) -> Wire:
        """The format in which tensors are sent: that of the first option that brings one."""
        for other in self.others:
            if other.wire is not None:
                return other.wire
        return AS_IT_IS

    @property
    def with_gradients(self) -> AttnOptions:
        """The options for calls that require a gradient: with the exact form of the backend, and without
        options that have no gradient. ``self``, the same object, if that changes nothing.
        """
        backend = self.backend
        exact = backend
        if backend is not None and backend in EXACT_FORM:
            exact = EXACT_FORM[backend]
        others = tuple([other for other in self.others if other.has_gradient])
        if exact == backend and len(others) == len(self.others):
            return self
        return replace(self, backend=exact, others=others)

    @property
    def records(self) -> dict[str, object]:
        """The optional options by name, None for those that are not set: what ranks compare."""
        records: dict[str, object] = dict.fromkeys(_KINDS)
        for other in self.others:
            records[other.option] = other.record
        return records

    @property
    def by_name(self) -> dict[str, str]:
        """All options as strings that ranks can compare."""
        values = {"rotate_method": self.rotate_method, "backend": self.backend, **self.records}
        return {name: str(value) for name, value in values.items()}

    def as_text(self) -> str:
        """Return this value as JSON. Equal values give equal text on all ranks."""
        others = {other.option: [*other.fields] for other in self.others}
        return to_json(_Record(self.rotate_method, self.backend, others))

    @staticmethod
    def read(text: str) -> AttnOptions:
        """Return the options whose JSON form :meth:`as_text` wrote."""
        record = from_json(_Record, text)
        others = [_KINDS[name](*fields) for name, fields in record.others.items()]
        return AttnOptions(record.rotate_method, record.backend, tuple(others))


@dataclass(frozen=True)
class _Record:
    """The JSON form of options: the fields of each optional one by its name."""

    rotate_method: RotateMethod
    backend: Backend | None
    others: Mapping[str, list[Any]]
