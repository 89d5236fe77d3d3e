"""One call on all ranks of a mesh: is it the same call, with the same random numbers, and what if it ends on one alone?

Asked once per call of a pipeline, or of a transformer that is called by hand. A rank that leaves a call alone cannot tell those
that wait for it: they give up after the group's timeout, and say why it left.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from para_core.adapters.cache.generation import PipelineCache, caching_of
from para_core.adapters.compatibility import Case, When, applied_mesh, reason_against
from para_core.adapters.consistency.agreed_callbacks import AgreedCallbacks
from para_core.adapters.consistency.callbacks import around_callbacks
from para_core.adapters.consistency.failures import Place, leave_reason, places_of_all, why_no_answer
from para_core.adapters.consistency.loras import Loras
from para_core.adapters.consistency.state import pipe_state
from para_core.adapters.parallel.cfg_output import foreseen_output
from para_core.adapters.registry import TRANSFORMERS
from para_core.adapters.rows.unet_rows import known_equal_unets
from para_core.adapters.weights.pipefusion import FusedPipe
from para_core.cfg.deferred import materialize
from para_core.cfg.guidance import Guidance
from para_core.distributed.collectives import broadcast_bytes
from para_core.distributed.consistency import Record, Unanswered, agree, exchange, signature
from para_core.distributed.fingerprints import fingerprints
from para_core.distributed.mesh import GuidedMesh, groups_among, host_group
from para_core.instance_patching import Order, original_class, uncompiled, unwrap, wrap_method, wrapper
from para_core.plans.region import inputs_verified, reattach_plan
from para_core.torch_internals import set_group_timeout
from para_core.weights.stages import known_equal_stages

_KEY = "parallel"
_GUIDANCE = "guidance"
_CALLBACK = "callback with results"
_AGREED = "callback that is compared"
# Characters of a value in a record; a longer one is shortened and hashed.
_SHOWN = 60
_TOKEN_BYTES = 16


class ParallelCall:
    """What goes around the calls of one pipeline on a mesh, and of its transformers.

    Args:
        transformers: by the name of the component; each has its plan.
        unets: by their paths; each runs on rows.
        apart: its branches of guidance are calls of their own, which are distributed over the ``batch`` mesh dim.
        assume_equal: arguments are not compared over the ranks.

    Attributes:
        vaes: the autoencoders that were parallelized with the pipeline.
        sharded: weights were sharded with it, too.
        fused: its transformers run on patches, if they do.
    """

    def __init__(
        self,
        transformers: Mapping[str, nn.Module],
        unets: Mapping[str, nn.Module],
        mesh: GuidedMesh,
        *,
        apart: bool,
        assume_equal: bool,
    ) -> None:
        self.mesh = mesh
        self.vaes: list[nn.Module] = []
        self.sharded = False
        self.fused: FusedPipe | None = None
        self._transformers, self._unets = transformers, unets
        self._applied = {name: applied_mesh(module) for name, module in {**transformers, **unets}.items()}
        self._apart = apart
        self._assume_equal = assume_equal
        self._loras = Loras()
        self._caching: PipelineCache | None = None
        self._places: list[Place] = []  # of all ranks, once they have called together
        self._guidance = Guidance(mesh.batch, foreseen_output)
        self._signatures = {
            id(module): inspect.signature(original_class(module).forward)  # type: ignore[attr-defined]
            for module in transformers.values()
        }

    def put_around(self, pipe: Any) -> None:
        wrap_method(pipe, "__call__", _KEY, self._around, order=Order.PARALLEL)

    def _around(self, call: Callable[..., Any], pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.mesh.check_alive()
        problem = reason_against(
            When.PARALLEL_CALL,
            *[
                Case(pipe, module, name, mesh=self.mesh, applied=self._applied[name])
                for name, module in {**self._transformers, **self._unets}.items()
            ],
        )
        if not self._assume_equal:
            require_same_call(pipe, args, kwargs, self.mesh, f"the {type(pipe).__name__}", self._loras, problem)
        elif problem is not None:
            raise RuntimeError(problem)
        self._places = self._places or places_of_all(self.mesh)
        self._caching = caching_of(pipe)
        with ExitStack() as stack:
            token = stack.enter_context(random_state_of_first_rank(self.mesh))
            for name, module in self._transformers.items():
                reattach_plan(module)
                stack.enter_context(inputs_verified(module))
                stack.enter_context(known_equal_stages(module))
                component = getattr(pipe, name)
                if self._apart and wrapper(component, "__call__", _GUIDANCE) != self._share_out:
                    # Around what torch.compile made of it, if anything: a graph holds one call.
                    wrap_method(component, "__call__", _GUIDANCE, self._share_out, order=Order.GUIDANCE)
            stack.enter_context(known_equal_unets(self._unets.values()))
            stack.enter_context(reasons_shared(token, self._places))
            if self.fused is not None:
                # Its ranks come to a step at different times: a callback is not agreed upon, which would make them wait.
                stack.enter_context(self.fused.generation(pipe))
            elif not self._assume_equal:
                agreed = AgreedCallbacks(pipe, self.mesh, self._loras)
                kwargs = stack.enter_context(around_callbacks(kwargs, _AGREED, agreed.run, order=Order.GUIDANCE))
            if self._apart:
                stack.enter_context(self._warn_unguided(type(pipe).__name__))
                stack.enter_context(self._guidance.generation())
                kwargs = stack.enter_context(
                    around_callbacks(kwargs, _CALLBACK, self._with_results, order=Order.GUIDANCE)
                )
            result = materialize(call(pipe, *args, **kwargs))
        return materialize(result)

    def _with_results(self, callback: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A callback after the results of its step are on every rank: it may look at them on one rank alone."""
        self._guidance.finish()
        return callback(*args, **kwargs)

    def _share_out(self, call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self._guidance.active:
            return call(module, *args, **kwargs)
        if self._caching is not None:
            self._caching.announce(module, args, kwargs)
        # Here, for an error of the one rank that computes this call would leave the others waiting.
        self._signatures[id(uncompiled(module))].bind(module, *args, **kwargs)
        return self._guidance.call(module, partial(call, module), args, kwargs)

    @contextmanager
    def _warn_unguided(self, name: str) -> Iterator[None]:
        yield
        rounds = self._guidance.rounds
        if rounds and max(rounds) == 1:
            warnings.warn(
                f"this call of the {name} had no branches of guidance for the {self.mesh.batch.size} ranks along 'batch' to share: "
                "one computed what the others waited for. Guide, or give these ranks to the sequence (a mesh without "
                "max_batch_dim_size).",
                stacklevel=6,
            )


def parallel_call(pipe: Any) -> ParallelCall | None:
    """What :meth:`ParallelCall.put_around` put around ``pipe``, if it did."""
    found = getattr(wrapper(pipe, "__call__", _KEY), "__self__", None)
    return found if isinstance(found, ParallelCall) else None


def mesh_of(pipe: Any) -> GuidedMesh | None:
    """The ranks that run ``pipe``; None if it is not parallel."""
    found = parallel_call(pipe)
    return None if found is None else found.mesh


def remove_parallel_call(pipe: Any) -> None:
    """Take away what :class:`ParallelCall` put around ``pipe`` and its transformers."""
    for name in TRANSFORMERS:
        component = getattr(pipe, name, None)
        for module in (component, uncompiled(component)):
            if isinstance(module, nn.Module):
                unwrap(module, _GUIDANCE)
    unwrap(pipe, _KEY)


def require_same_call(
    pipe: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: GuidedMesh,
    what: str,
    loras: Loras,
    problem: str | None = None,
) -> None:
    """Raise on every rank, naming what differs, unless all ranks call with the same arguments: one exchange.

    Args:
        what: what is called, for messages.
        loras: of this pipeline, as they were described last.
        problem: why this rank cannot take part in the call; None if it can.

    Raises:
        ValueError: an argument differs between two ranks.
        TypeError: the arguments of a rank do not fit the signature of ``pipe``.
        RuntimeError: a rank has a ``problem``.
    """
    try:
        if problem is not None:
            raise RuntimeError(problem)
        signature_of_call = inspect.signature(original_class(pipe).__call__)
        given = _flat(signature_of_call.bind(pipe, *args, **kwargs).arguments)
        mine: Record | Exception = _record(
            {**given, **pipe_state(pipe, loras, decodes=given.get("output_type") != "latent")}
        )
    except (TypeError, ValueError, RuntimeError) as error:
        mine = error
    _require_alike(
        mine,
        mesh,
        what,
        "For different images on different ranks give each group of ranks a mesh of its own (a slice of a larger mesh).",
    )


def require_same_inputs(given: Mapping[str, Any], mesh: GuidedMesh, what: str, problem: str | None = None) -> None:
    """Raise on every rank, naming what differs, unless all ranks give a module the same inputs: one exchange.

    Args:
        what, problem: as for :func:`require_same_call`.

    Raises:
        ValueError: an input differs between two ranks.
        RuntimeError: a rank has a ``problem``.
    """
    try:
        mine: Record | Exception = _record(given) if problem is None else RuntimeError(problem)
    except (TypeError, ValueError, RuntimeError) as error:
        mine = error
    _require_alike(
        mine,
        mesh,
        what,
        "If another pipeline shares this transformer (from_pipe), have its random numbers and arguments kept alike too: "
        "parallelize_pipe(the_other_pipe, mesh=mesh). In a loop of your own, draw random numbers from a generator of the "
        "same seed on all ranks.",
    )


def _record(given: Mapping[str, Any]) -> Record:
    """Describe each value that is not None. All tensors together cost one wait for the device."""
    pieces = {name: list(_pieces(value)) for name, value in given.items() if value is not None}
    tensors = [piece for of_value in pieces.values() for piece in of_value if isinstance(piece, Tensor)]
    digits = iter(fingerprints(tensors))
    return {
        name: _shortened("".join(next(digits) if isinstance(piece, Tensor) else piece for piece in of_value))
        for name, of_value in pieces.items()
    }


def _require_alike(mine: Record | Exception, mesh: GuidedMesh, what: str, way_out: str) -> None:
    def explain(records: list[Record]) -> str:
        rank, other = next((rank, other) for rank, other in enumerate(records) if other != records[0])
        names = sorted(name for name in {*other, *records[0]} if other.get(name) != records[0].get(name))
        differing = "; ".join(
            f"{name}: rank 0 has {records[0].get(name, 'nothing')}, rank {rank} has {other.get(name, 'nothing')}"
            for name in names
        )
        return (
            f"the ranks of one mesh must call {what} alike, and sequence rank {rank} differs from rank 0. {differing}. "
            f"{way_out}"
        )

    agree(mine if isinstance(mine, Exception) else signature(mine), mesh, explain=explain)


def _flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """``**kwargs`` of a call by their own names; ``self`` left out."""
    flat: dict[str, Any] = {}
    for name, value in given.items():
        if name == "kwargs" and isinstance(value, dict):
            flat.update(value)
        elif name != "self":
            flat[name] = value
    return flat


def _hash(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def describe(value: Any) -> str:
    """A short text that is equal for equal arguments, also in another process."""
    text: str = _record({"": value}).get("", "None")
    return text


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}… ({_hash(text.encode())})"


def _pieces(value: Any) -> Iterator[str | Tensor]:
    """Yield what describes ``value``, in parts. A tensor stands for its fingerprint."""
    if value is None or isinstance(value, (str, bool, int, float)):
        yield repr(value)
    elif isinstance(value, Tensor):
        yield f"tensor{list(value.shape)} {str(value.dtype).removeprefix('torch.')} "
        yield value
    elif isinstance(value, torch.Generator):
        yield f"generator {_hash(value.get_state().numpy().data)}"
    elif isinstance(value, Mapping):
        yield from _joined("{}", [(f"{key!r}: ", item) for key, item in value.items()])
    elif isinstance(value, (list, tuple)):
        yield from _joined("[]", [("", item) for item in value])
    elif is_dataclass(value) and not isinstance(value, type):  # the frames that LTX-Video is given, and their places
        yield from _pieces({field.name: getattr(value, field.name) for field in fields(value)})
    elif hasattr(value, "tobytes"):  # PIL images, numpy arrays
        shape = getattr(value, "size", None) if not hasattr(value, "shape") else value.shape
        yield f"{type(value).__name__} {shape} {_hash(value.tobytes())}"
    else:
        # A callback, or an object of the user's: only its kind can be compared.
        yield f"a {type(value).__name__}"


def _joined(brackets: str, items: Sequence[tuple[str, Any]]) -> Iterator[str | Tensor]:
    yield brackets[0]
    for index, (prefix, item) in enumerate(items):
        yield f", {prefix}" if index else prefix
        yield from _pieces(item)
    yield brackets[1]


def set_timeout(mesh: GuidedMesh, timeout: timedelta | float, *others: dist.ProcessGroup) -> None:
    """Set how long collectives among the ranks of ``mesh``, and over ``others``, wait for a rank that does not answer.

    This includes the groups that were made for these ranks before: edges of stages, rows of an image, CPU tensors. All ranks of the mesh
    call it.

    Args:
        timeout: In seconds, if it is a number.

    Raises:
        ValueError: it is not positive.
    """
    timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if timeout <= timedelta(0):
        raise ValueError(
            f"timeout is {timeout.total_seconds()} s; expected a positive number of seconds, or a timedelta."
        )
    of_mesh = [group for dim in mesh.dims if dim.group is not None for group in {dim.group, host_group(dim)}]
    several = sum(dim.group is not None for dim in mesh.dims) > 1
    ranks = (
        {record["rank"] for record in exchange({"rank": dist.get_rank()}, mesh)}
        if several
        else {rank for group in of_mesh for rank in dist.get_process_group_ranks(group)}
    )
    for group in {*of_mesh, *groups_among(ranks), *others}:
        set_group_timeout(group, timeout)


@contextmanager
def random_state_of_first_rank(mesh: GuidedMesh) -> Iterator[str]:
    """Inside, the default generators continue those of the mesh's first rank; afterwards each rank has its own again.

    The first rank's move on, as if it had run alone. Gives a token of this call, the same on all ranks.
    """
    # Whatever the mesh says: diffusers takes random numbers on the pipeline's device, and a gloo group also serves accelerators.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device_module = None if accelerator is None else torch.get_device_module(accelerator)
    own = [torch.get_rng_state()] + ([device_module.get_rng_state()] if device_module else [])
    token = torch.frombuffer(bytearray(os.urandom(_TOKEN_BYTES)), dtype=torch.uint8)
    shared: list[Tensor] = list(broadcast_bytes(torch.cat([token, *own]), mesh).split([_TOKEN_BYTES, *map(len, own)]))
    torch.set_rng_state(shared[1].clone())
    if device_module:
        device_module.set_rng_state(shared[2].clone())
    try:
        yield bytes(shared[0].tolist()).hex()
    finally:
        if mesh.rank != 0:
            torch.set_rng_state(own[0])
            if device_module:
                device_module.set_rng_state(own[1])


@contextmanager
def reasons_shared(token: str, places: Sequence[Place]) -> Iterator[None]:
    """Inside, an exception leaves its reason for the other ranks, and a collective's time-out gives theirs.

    On gloo: NCCL's time-out ends the process and raises nothing here (docs/time_outs.md).
    """
    try:
        yield
    except BaseException as error:
        if _is_unanswered(error):
            raise RuntimeError(
                f"another rank stopped answering in the middle of this call: {why_no_answer(token, places)} This rank "
                "gave up waiting."
            ) from error
        if dist.is_initialized():  # one process alone may have no group
            leave_reason(token, f"rank {dist.get_rank()} raised {type(error).__name__}: {error}")
        raise


def _is_unanswered(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, Unanswered) or (isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS))


_SIGNS = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe")
