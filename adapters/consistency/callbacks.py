"""Run the callbacks of a pipeline's call, and raise on all ranks if they have not the same effect on all ranks.

After each callback the ranks exchange a few numbers over the CPU. Only if a callback changed something on some rank,
they also compare fingerprints of the returned tensors and of the LoRAs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor

from para_core.adapters.consistency.loras import Loras, fingerprint, is_version, version_of
from para_core.distributed.consistency import Record, check_consistent, differing_fields, signature
from para_core.distributed.mesh import GuidedMesh
from para_core.instance_patching import WrapperPriority, unwrap, wrap_method

_WAY_OUT = (
    "A callback must make the same change on all ranks: draw random numbers from a generator with the same seed, and "
    "do what only one rank should do (logging, saving) without changing the pipeline."
)


@contextmanager
def around_callbacks(
    kwargs: Mapping[str, Any], key: str, run: Callable[..., Any], *, order: WrapperPriority
) -> Iterator[dict[str, Any]]:
    """Replace each callback in ``kwargs`` by ``run(callback, *args, **kwargs)`` inside the ``with`` block.

    ``kwargs`` are those of a pipeline's call; callbacks are those whose names begin with ``callback``. Yields the
    keyword arguments to call the pipeline with. ``order`` is the priority among the wrappers of one callback.
    """
    wrapped = dict(kwargs)
    with ExitStack() as stack:
        for name, callback in kwargs.items():
            if not name.startswith("callback") or not callable(callback):
                continue
            if hasattr(callback, "tensor_inputs"):
                # Pipelines check the class of a PipelineCallback, so wrap its method instead of replacing it.
                stack.callback(unwrap, callback, key)
                wrap_method(callback, "__call__", key, run, order=order, plain_copies=True)
            else:
                wrapped[name] = partial(run, callback)
        yield wrapped


class CheckedCallbacks:
    """Runner of callbacks that compares their effects on ``pipe`` between the ranks of ``mesh``.

    ``loras`` are descriptions of the LoRAs of ``pipe``, made when the call began.
    """

    def __init__(self, pipe: Any, mesh: GuidedMesh, loras: Loras) -> None:
        self._pipe, self._mesh, self._loras = pipe, mesh, loras

    def run(self, callback: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return ``callback(*args, **kwargs)``, after all ranks have run their callback with the same effect.

        Raises ``ValueError`` if the effect differs, and ``RuntimeError`` if the callback raised on another rank.
        """
        inputs = _tensors(args)
        versions = {name: version_of(x) for name, x in inputs.items()}
        try:
            result = callback(*args, **kwargs)
        except Exception as error:
            # Raise the error of the callback, even if no other rank answers.
            with suppress(RuntimeError):
                check_consistent(RuntimeError(f"its callback raised {type(error).__name__}: {error}"), self._mesh)
            raise
        outputs = _tensors((result,))
        changed = any(inputs.get(name) is not x or not is_version(x, versions[name]) for name, x in outputs.items())
        self._compare(outputs, changed)
        return result

    def _compare(self, outputs: Mapping[str, Tensor], changed: bool) -> None:
        scale = getattr(self._pipe, "_guidance_scale", None)
        state: Record = {
            # Callbacks set _interrupt to end a generation, and _guidance_scale to end its guidance.
            "interrupt": getattr(self._pipe, "_interrupt", None),
            "guidance_scale": scale if scale is None or isinstance(scale, (bool, int, float, str)) else repr(scale),
            **{f"shape of {name}": str(list(x.shape)) for name, x in outputs.items()},
            **{f"dtype of {name}": str(x.dtype).removeprefix("torch.") for name, x in outputs.items()},
        }
        flags = [int(changed), int(self._loras.changed(self._pipe))]
        flags_of_ranks = check_consistent(signature(state), self._mesh, flags, explain=_explain)
        if any(tensors for tensors, _ in flags_of_ranks):
            values = {f"values of {name}": fingerprint([x]) for name, x in outputs.items()}
            check_consistent(signature(values), self._mesh, explain=_explain)
        if any(loras for _, loras in flags_of_ranks):
            check_consistent(signature(dict(self._loras.described(self._pipe))), self._mesh, explain=_explain)


def _tensors(values: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return the tensors among ``values`` by name.

    A callback takes and returns its tensors in a dict, or as separate arguments in the deprecated form of callbacks.
    """
    named = {f"argument {index}": value for index, value in enumerate(values)}
    for value in values:
        if isinstance(value, Mapping):
            named.update(value)
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _explain(records: list[Record]) -> str:
    return f"the effect of a callback differs between ranks. {'; '.join(differing_fields(records))}. {_WAY_OUT}"
