"""A callback that does something else on one rank: an error on all of them, instead of a wrong image or a wait for the time-out.

After each callback the ranks exchange a few numbers, over the CPU. Only where a callback changed something on some rank are values
compared: a fingerprint of the tensors that it returned, and of the LoRAs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from para_core.adapters.consistency.loras import Loras, fingerprint, is_version, version_of
from para_core.distributed.consistency import Record, check_consistent, signature
from para_core.distributed.mesh import GuidedMesh

_WAY_OUT = (
    "A callback must change the same, in the same way, on all ranks: draw random numbers from a generator of the same seed, and do "
    "what only one rank shall do (logging, saving) without changing the pipeline."
)


class AgreedCallbacks:
    """Runs the callbacks of one call of ``pipe`` on the ranks of ``mesh``; ``loras`` were described when it began."""

    def __init__(self, pipe: Any, mesh: GuidedMesh, loras: Loras) -> None:
        self._pipe, self._mesh, self._loras = pipe, mesh, loras

    def run(self, callback: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """``callback(*args, **kwargs)``, after which all ranks are where this one is.

        Raises:
            ValueError: it changed something on one rank that it did not change alike on the others.
            RuntimeError: it raised on another rank.
            Exception: what it raised here.
        """
        given = _tensors(args)
        versions = {name: version_of(x) for name, x in given.items()}
        try:
            result = callback(*args, **kwargs)
        except Exception as error:
            self._raise_everywhere(error)
            raise
        found = _tensors((result,))
        changed = any(given.get(name) is not x or not is_version(x, versions[name]) for name, x in found.items())
        self._compare(found, changed)
        return result

    def _raise_everywhere(self, error: Exception) -> None:
        try:
            check_consistent(RuntimeError(f"its callback raised {type(error).__name__}: {error}"), self._mesh)
        except RuntimeError:
            return  # this rank raises its own, also where no other answers

    def _compare(self, found: Mapping[str, Tensor], changed: bool) -> None:
        state: Record = {
            # What callbacks set to end a generation, and to end its guidance.
            "interrupt": getattr(self._pipe, "_interrupt", None),
            "guidance_scale": _plain(getattr(self._pipe, "_guidance_scale", None)),
            **{f"shape of {name}": str(list(x.shape)) for name, x in found.items()},
            **{f"dtype of {name}": str(x.dtype).removeprefix("torch.") for name, x in found.items()},
        }
        mine = [int(changed), int(self._loras.changed(self._pipe))]
        of_all = check_consistent(signature(state), self._mesh, mine, explain=_explain)
        if any(one[0] for one in of_all):
            values = {name: f"{fingerprint([x]):x}" for name, x in found.items()}
            check_consistent(
                signature({f"values of {name}": value for name, value in values.items()}), self._mesh, explain=_explain
            )
        if any(one[1] for one in of_all):
            check_consistent(signature(dict(self._loras.described(self._pipe))), self._mesh, explain=_explain)


def _tensors(values: tuple[Any, ...]) -> dict[str, Tensor]:
    """By name, the tensors that a step's callback was given, or gave: in a dict, or (an old form) as arguments."""
    found = {f"argument {index}": value for index, value in enumerate(values)}
    for value in values:
        if isinstance(value, Mapping):
            found.update(value)
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


def _explain(records: list[Record]) -> str:
    rank, other = next((rank, other) for rank, other in enumerate(records) if other != records[0])
    differing = "; ".join(
        f"{name}: rank 0 has {records[0].get(name, 'nothing')}, rank {rank} has {other.get(name, 'nothing')}"
        for name in sorted({*other, *records[0]})
        if other.get(name) != records[0].get(name)
    )
    return f"after the same step a callback left sequence rank {rank} otherwise than rank 0. {differing}. {_WAY_OUT}"
