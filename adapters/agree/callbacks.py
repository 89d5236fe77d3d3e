"""Run the callbacks of a pipeline's call, and raise on all ranks if they have not the same effect on all
ranks.

After each callback the ranks exchange a few numbers over the CPU. The LoRAs, and the values of tensors that a
callback changed, follow in the next exchange, after the next callback or at the end of the call: meanwhile
the device computes their fingerprints, and the host need not wait for the step that runs. Other attributes
of the pipeline, which a callback may set too, are not compared.

``adapters/parallel/call.py`` uses :class:`CheckedCallbacks`. The cache, CFG over ranks and schedules of
attention use only :func:`wrap_callbacks`, each with a slot of its own. Tests:
tests/adapters/agree/test_state.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor

from para_core.adapters.agree.arguments import PendingRecord, agree_on_texts, describe_value
from para_core.adapters.agree.loras import describe_loras
from para_core.adapters.registry import transformers_of
from para_core.dataclass_fields import leaves_of
from para_core.distributed.agree import agree
from para_core.distributed.mesh import GuidedMesh
from para_core.distributed.records import Record, describe_differences
from para_core.instance.record import empty_slot, fill_slot
from para_core.instance.slots import Slot
from para_core.lazy_tensors import materialize
from para_core.plans.region import region_of

_WAY_OUT = (
    "A callback must make the same change on all ranks: draw random numbers from a generator with the same seed, and "
    "do what only one rank should do (logging, saving) without changing the pipeline."
)


@contextmanager
def wrap_callbacks(
    kwargs: Mapping[str, Any], slot: Slot, run: Callable[..., Any]
) -> Iterator[dict[str, Any]]:
    """Replace each callback in ``kwargs`` by ``run(callback, *args, **kwargs)`` inside the ``with`` block.

    ``kwargs`` are those of a pipeline's call; callbacks are those whose names contain ``callback``, such as
    ``prior_callback_on_step_end``. Yields the keyword arguments to call the pipeline with. ``slot`` is the
    slot of a callback that is an object; it is empty after the block, so such a callback must not pass itself
    to a call that it makes. A callback that the user passes by position, after some twenty arguments, runs
    unwrapped.

    >>> given = {"prior_callback_on_step_end": print, "prompt": "a cat"}
    >>> with wrap_callbacks(given, Slot.CACHE, lambda callback, *args: callback("checked:", *args)) as kwargs:
    ...     kwargs["prior_callback_on_step_end"]("step 1")
    checked: step 1
    """
    wrapped = dict(kwargs)
    with ExitStack() as stack:
        for name, callback in kwargs.items():
            if "callback" not in name or not callable(callback):
                continue
            if hasattr(callback, "tensor_inputs"):
                # Pipelines check the class of a PipelineCallback, so wrap its method instead of replacing it.
                stack.callback(empty_slot, callback, slot)
                fill_slot(callback, slot, {"__call__": partial(_run_method, run)}, permits_copies=True)
            else:
                wrapped[name] = partial(run, callback)
        yield wrapped


def _run_method(
    run: Callable[..., Any], call: Callable[..., Any], callback: object, /, *args: Any, **kwargs: Any
) -> Any:
    """Return ``run(function, *args, **kwargs)``, where ``function`` runs the method ``call`` of ``callback``,
    so that ``run`` gets the arguments that it gets for a callback that is a function.
    """
    return run(partial(call, callback), *args, **kwargs)


class CheckedCallbacks:
    """Runner of callbacks that compares their effects on ``pipe`` between the ranks of ``mesh``.

    After the last callback of a call, all ranks must call :meth:`finish`.
    """

    def __init__(self, pipe: Any, mesh: GuidedMesh) -> None:
        self._pipe, self._mesh = pipe, mesh
        # The values of tensors before and after the last callback, and the LoRAs after it, until they are
        # compared.
        self._pending: tuple[PendingRecord, PendingRecord, PendingRecord] | None = None

    def run(self, callback: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return ``callback(*args, **kwargs)``, after all ranks have run their callback. Collective.

        Raises ``RuntimeError`` if the callback, or reading its effect, raised on another rank, and
        ``ValueError`` if its effect differs. If only values of tensors or LoRAs differ, the next call of this
        method or of :meth:`finish` raises that.
        """
        try:
            inputs = materialize(_tensors_by_name(*args, **kwargs))
            before = PendingRecord(_named_values(inputs))
            result = callback(*args, **kwargs)
            outputs = {**inputs, **materialize(_tensors_by_name(result))}
            planned = {}
            for name, module in transformers_of(self._pipe).items():
                region = region_of(module)
                if region is not None:
                    planned[name] = region, module
            state = self._describe_state(outputs)
            # Functions of two processes cannot be compared, but how often they were changed can. If the code
            # of one rank alone changed, that rank alone would verify its next call, which is collective.
            state |= {
                f"changes of code inside pipe.{name}": region.check.note_changes()
                for name, (region, _) in planned.items()
            }
        except Exception as error:
            # Raise the error of this rank, even if no other rank answers.
            with suppress(RuntimeError):
                agree(
                    RuntimeError(
                        f"its callback (or reading its effect) raised {type(error).__name__}: {error}"
                    ),
                    self._mesh,
                )
            raise
        self._compare(state)
        # A callback may have set other attention processors or hooks. Warn of them only after the ranks have
        # compared, so that a difference is told first, and outside of the handler above, whose exchange no
        # other rank would answer now.
        for region, module in planned.values():
            region.check_new_code(module)
        self._pending = (
            before,
            PendingRecord(_named_values(outputs)),
            PendingRecord(describe_loras(self._pipe)),
        )
        return result

    def _describe_state(self, outputs: Mapping[str, Any]) -> Record:
        """Return the attributes of the pipeline that callbacks set, and the shapes and dtypes of ``outputs``."""
        tensors = {
            name: [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]
            for name, value in outputs.items()
        }
        scale = getattr(self._pipe, "_guidance_scale", None)
        if not (scale is None or isinstance(scale, (bool, int, float, str))):
            scale = describe_value(scale)  # repr of a tensor names its device
        return {
            # Callbacks set _interrupt to end a generation, and _guidance_scale to end its guidance. Pipelines
            # read only whether _interrupt is true, which may be a tensor: the result of a comparison.
            "interrupt": bool(getattr(self._pipe, "_interrupt", False)),
            "guidance_scale": scale,
            **{
                f"shape of {name}": ", ".join([str(list(x.shape)) for x in xs])
                for name, xs in tensors.items()
            },
            **{
                f"dtype of {name}": ", ".join([str(x.dtype).removeprefix("torch.") for x in xs])
                for name, xs in tensors.items()
            },
        }

    def finish(self) -> None:
        """Compare the values of tensors and LoRAs after the last callback, if there was one. Collective."""
        if self._pending is not None:
            self._compare({})

    def _compare(self, state: Record) -> None:
        """Raise on all ranks if ``state`` or what is pending differs. Collective; nothing is pending afterwards."""
        pending, self._pending = self._pending, None
        stages: Mapping[str, int] = {}
        if pending is not None:
            before, after, loras = (record.wait() for record in pending)
            values = dict(after)
            # Values that a callback left alone may have differed before it, which it must not be blamed for.
            for name, text in after.items():
                if before.get(name) == text:
                    values[name] = "unchanged"
            state, stages = {**values, **loras, **state}, pending[-1].stages
        agree_on_texts(state, stages, self._mesh, _explain)


def _named_values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"values of {name}": value for name, value in values.items()}


def _tensors_by_name(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the tensors, and lists of tensors, among the arguments and in dicts among them, by name.

    A callback takes and returns its tensors in a dict, or as separate arguments in the deprecated form of
    callbacks. The embeddings of a prompt may be a list, with a tensor for each prompt (Z-Image).
    """
    arguments = {f"argument {index}": value for index, value in enumerate(args)} | kwargs
    named = {name: value for name, value in arguments.items() if not isinstance(value, Mapping)}
    for value in arguments.values():
        if isinstance(value, Mapping):
            named.update(value)
    return {
        name: value
        for name, value in named.items()
        if any(isinstance(leaf, Tensor) for leaf in leaves_of(value))
    }


def _explain(records: list[Record]) -> str:
    return f"the effect of a callback differs between ranks. {'; '.join(describe_differences(records))}. {_WAY_OUT}"
