"""CFG parallelism: distribute the model calls of CFG branches over ranks, without changes to pipeline code.

Each model call is computed only by the ranks that have a certain index along the ``batch`` mesh dim. The
other ranks get a lazy tensor (:class:`~para_core.lazy_tensors.LazyTensor`) and continue. When the values of a
lazy tensor are needed, usually after the call of the next branch, one exchange gives every rank the results
of all branches. The calls between two exchanges are a *round*.

If a round has a single call, this call, too, is computed by the ranks of one index only. Computing it on all
ranks would not be faster. First Block Cache, which decides by the branches that its rank has computed, would
moreover decide differently on the ranks.

The other ranks must know the *form* of the output (shapes, dtypes, containers). The form is predicted on the
meta device, or known from an earlier call that all ranks computed. At the end of a round with new forms, the
ranks compare the predictions with each other and with the outputs.

``adapters/cfg/guided_calls.py`` makes a :class:`Guidance` for a pipeline, and ``output_form.py`` beside it
predicts forms. The lazy tensors of a round are in :mod:`.rounds`. Tests: tests/cfg/test_guidance.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from para_core.cfg.rounds import ModelCall, Round, RoundOutput
from para_core.dataclass_fields import leaves_of
from para_core.distributed.agree import agree
from para_core.distributed.collectives import all_gather
from para_core.distributed.fingerprints import tensor_bytes
from para_core.distributed.mesh import MeshDim, one_guided_rank
from para_core.lazy_tensors import Expected, LazyTensor, LiveTensors, materialize
from para_core.torch_internals import pytree

# A function predict(model, args, kwargs) that returns the output of the call as meta tensors, or None if this
# is impossible. The result must only depend on values that are equal on all ranks. It is not None only if the
# arguments have tensors with more than one element, all on one device: the output is expected on that device.
PredictOutput = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class _Form:
    """The form of a model's output: the shape, dtype and device of each tensor in ``leaves`` (None for each
    None), and the containers in ``spec``.
    """

    leaves: list[Expected | None]
    spec: pytree.TreeSpec

    @property
    def tensors(self) -> list[Expected]:
        """The forms of the tensors, without None."""
        return [x for x in self.leaves if x is not None]

    @property
    def text(self) -> str:
        """The form as a string, by which ranks compare forms. Strides do not matter: elements are sent in order."""
        leaves = [x and f"{x.like.dtype} {list(x.like.shape)} on {x.device.type}" for x in self.leaves]
        return f"{self.spec} of {', '.join(map(str, leaves))}"

    def with_tensors(self, tensors: list[Any]) -> Any:
        """Return an output of this form that contains ``tensors``."""
        rest = iter(tensors)
        leaves: list[Any] = []
        for x in self.leaves:
            if x is None:
                leaves.append(None)
            else:
                leaves.append(next(rest))
        return pytree.tree_unflatten(leaves, self.spec)


class Guidance:
    """CFG parallelism of one pipeline: distributes its model calls over the ranks of ``dim``. Eager, in one
    thread.

    All ranks of ``dim`` run the same pipeline code, so they make the same calls in the same order, and each
    round ends on all of them at the same point. Code that runs on some ranks only must not touch a lazy
    tensor.

    ``predict`` predicts the form of a model's output without running it. Without it, all ranks compute the
    first call with each combination of input shapes, to learn the form of its output.
    """

    def __init__(self, dim: MeshDim, predict: PredictOutput | None = None) -> None:
        self._dim = dim
        self._mesh = replace(one_guided_rank("cpu"), batch=dim)
        self._predict = predict
        self._live = LiveTensors()
        self._round = self._new_round()
        # The known or predicted form of a model's output. The key is the model and the shapes, dtypes, bools
        # and strings of its inputs.
        self._forms: dict[Any, _Form] = {}
        # The forms, by the same keys, that the ranks have not compared yet; None if a form was not predicted.
        self._unverified: dict[Any, _Form | None] = {}
        # The keys whose prediction was wrong, so that the form is not predicted again.
        self._mispredicted: set[Any] = set()
        # Whether model calls are currently distributed.
        self.active = False
        # Number of model calls in each round of the last generation.
        self.rounds: list[int] = []

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Distribute model calls over ranks inside the ``with`` block. At its end, lazy tensors get their
        data.

        Collective at its end, unless the block raises: then lazy tensors without data are filled with NaN or
        0.
        """
        self._live = LiveTensors()
        self._round = self._new_round()
        self.rounds = []
        self._drop_unverified()
        self.active = True
        try:
            yield
            self.finish()
        finally:
            self.active = False
            # A round that has not ended, because the block raised, holds outputs of the model.
            self._round = self._new_round()
            self._live.become_tensors()

    def call(
        self, model: Any, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the output of ``compute(*args, **kwargs)``, which only some of the ranks compute, as lazy
        tensors.

        The ranks with a certain index along the mesh dim compute the call. If the form of its output is
        neither known nor predicted, all ranks compute the call. Calls whose arguments have equal shapes,
        dtypes, devices, bools and strings must return outputs of the same form. Collective if an argument is
        the result of a call in the same round.

        Args:
            model: The model that is called.
            compute: A function that calls the model.

        Raises:
            TypeError: The output contains something besides tensors and None.
            RuntimeError: The output does not have the form that was predicted, or that an earlier call had.
            Exception: ``compute`` failed.

        As long as the ranks have not compared the form, all ranks raise such an error when the round ends. Later
        only the ranks that compute the call raise it, and the others wait for them.
        """
        leaves = leaves_of((args, kwargs))
        lazy = [x for x in leaves if isinstance(x, LazyTensor)]
        if any(getattr(x.source, "round", None) is self._round for x in lazy):
            # An argument is the result of a call in this round, so end the round. Do this even on ranks that
            # have computed that result, because ending a round is a collective call.
            self.finish()
        if lazy:
            # Each argument by itself, so that an object without lazy tensors is passed on as it is.
            args = tuple(map(materialize, args))
            kwargs = {name: materialize(value) for name, value in kwargs.items()}
        key = _key_of(model, leaves)
        if key not in self._forms:
            self._predict_form(key, model, args, kwargs)
        run = partial(_compute_form, model, compute, args, kwargs)
        form = self._forms.get(key)
        if form is None:
            try:
                form, tensors = run()
            except Exception as error:
                # Ranks on which the call succeeded compare their records when they end the round: raise there, too.
                self._round.calls.append(ModelCall(None, [], failure=error))
                self.finish()
                raise
            self._forms[key] = form
            call = ModelCall(owner=None, expected=form.tensors, leaves=tensors)
        else:
            owner = len(self._round.calls) % self._dim.size
            call = ModelCall(owner, form.tensors)
            if owner == self._dim.index:
                self._compute(call, run, key, model)
        self._round.calls.append(call)
        sources = [RoundOutput(self._round, partial(call.leaf, index)) for index in range(len(call.expected))]
        return form.with_tensors(
            [LazyTensor.make(*pair) for pair in zip(sources, call.expected, strict=True)]
        )

    def _compute(
        self, call: ModelCall, run: Callable[[], tuple[_Form, list[Tensor]]], key: Any, model: Any
    ) -> None:
        """Compute ``call`` by ``run``, and store its output, or the error that all ranks raise when the round ends."""
        try:
            actual, call.leaves = run()
            if actual.text != self._forms[key].text:
                self._raise_other_form(key, model, self._forms[key], actual)
        except Exception as error:
            # If the form is unverified, the ranks compare their records when the round ends, so keep the
            # error until then, to raise it on all ranks. Otherwise there is no such comparison, and only this
            # rank raises the error.
            if key not in self._unverified:
                raise
            call.failure = error

    def _raise_other_form(self, key: Any, model: Any, form: _Form, actual: _Form) -> NoReturn:
        """Raise for a call that returned another form than the others expect: they would misread its bytes."""
        if key in self._unverified:
            self._mispredicted.add(key)
            raise RuntimeError(
                f"CFG parallelism predicted that {type(model).__name__} returns {form.text}; it returned "
                f"{actual.text}. Call the pipeline again: all ranks then compute the first call, and no "
                "prediction is needed. Or use a mesh without a 'batch' dim."
            )
        raise RuntimeError(
            f"{type(model).__name__} returned {actual.text}, and {form.text} in an earlier call whose arguments have "
            "equal shapes, dtypes, bools and strings; CFG parallelism expects the same form from both. Use a mesh "
            "without a 'batch' dim."
        )

    def finish(self) -> None:
        """End the round: give all ranks the results of its calls, then run the postponed operators.
        Collective.

        Raises:
            ValueError: The ranks predicted different forms of an output.
            Exception: A call of the round failed on a rank: its own exception there, and on the other ranks
                one that names that rank.
        """
        if not self._round.calls:
            return
        ended = self._round
        self._round = self._new_round()
        if self._unverified:
            # Raise on all ranks if a call failed on any rank, or if the ranks predicted different forms.
            failure = next((call.failure for call in ended.calls if call.failure is not None), None)
            predicted: list[str | None] = []
            for form in self._unverified.values():
                if form is None:
                    predicted.append(None)
                else:
                    predicted.append(form.text)
            try:
                agree(failure or {"the form of a model's output": predicted}, self._mesh)
            except Exception:
                self._drop_unverified()
                if failure is not None:
                    raise failure from None
                raise
            self._unverified = {}
        self._exchange(ended.calls)
        ended.is_over = True
        while ended.later:
            # Remove each operation, because it holds its arguments.
            ended.later.pop(0)()
        self.rounds.append(len(ended.calls))

    def _new_round(self) -> Round:
        return Round(self._dim.size, self.finish, self._live)

    def _predict_form(self, key: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the predicted form of a call, or that it cannot be predicted, until the ranks compare them."""
        predicted = None
        if self._predict is not None and key not in self._mispredicted:
            predicted = self._predict(model, args, kwargs)
        if predicted is None:
            self._unverified[key] = None
            return
        device = next(x.device for x in leaves_of((args, kwargs)) if isinstance(x, Tensor) and x.numel() > 1)
        form, _ = _form_of(predicted, lambda x: Expected(x, device))
        self._forms[key] = self._unverified[key] = form

    def _drop_unverified(self) -> None:
        """Forget the forms that the ranks have not compared, because a generation failed before it."""
        for key in self._unverified:
            self._forms.pop(key, None)
        self._unverified = {}

    def _exchange(self, calls: list[ModelCall]) -> None:
        """Give all ranks the output tensors of each call of the round, as bytes in one all-gather.
        Collective.
        """
        calls_by_rank = [[call for call in calls if call.owner == rank] for rank in range(self._dim.size)]
        distributed = [call for rank_calls in calls_by_rank for call in rank_calls]
        expected = [x for call in distributed for x in call.expected]
        # A model whose calls only fill a cache may return no tensor.
        if not expected:
            return
        sizes = [
            sum(x.num_bytes for call in rank_calls for x in call.expected) for rank_calls in calls_by_rank
        ]
        computed = [tensor_bytes(x) for call in calls_by_rank[self._dim.index] for x in call.leaves]
        empty = torch.empty(0, dtype=torch.uint8, device=expected[0].device)
        received = all_gather(torch.cat([empty, *computed]), sizes, 0, self._dim)
        parts = iter(received.split([x.num_bytes for x in expected]))
        for call in distributed:
            call.leaves = [_tensor_like(x.like, next(parts)) for x in call.expected]


def _tensor_like(like: Tensor, data: Tensor) -> Tensor:
    """Return a tensor with the shape, strides and dtype of ``like``, and the elements in the bytes ``data``."""
    # Clone the bytes, because view(dtype) requires a storage offset that is aligned to the dtype.
    values = data.clone().view(like.dtype).view(like.shape)
    if values.stride() == like.stride():
        return values
    # Views that were postponed have been computed for these strides, and may be impossible with others.
    return torch.empty_like(like, device=data.device).copy_(values)


def _key_of(model: Any, leaves: list[Any]) -> tuple[Any, ...]:
    """Return the key of the form of a call of ``model`` whose arguments have these ``leaves``.

    Bools and strings, such as return_dict and kv_cache_mode, may change the form of the output. Numbers are
    left out, because they change from step to step.
    """
    key: list[Any] = [id(model)]
    for x in leaves:
        if isinstance(x, Tensor):
            key.append((x.shape, x.dtype, x.device))
        elif isinstance(x, (bool, str)):
            key.append(x)
    return tuple(key)


def _compute_form(
    model: Any, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[_Form, list[Tensor]]:
    """Compute a call of ``model``, and return the form of its output, and the tensors in it.

    Raises:
        TypeError: The output contains something besides tensors and None.
    """
    output = compute(*args, **kwargs)
    if not all(x is None or isinstance(x, Tensor) for x in pytree.tree_leaves(output)):
        raise TypeError(
            f"CFG branches cannot be distributed over ranks: {type(model).__name__} returned something besides "
            "tensors. Use a mesh without a 'batch' dim."
        )
    return _form_of(output, lambda x: Expected(x.to("meta"), x.device))


def _form_of(output: Any, expected: Callable[[Tensor], Expected]) -> tuple[_Form, list[Tensor]]:
    """Return the :class:`_Form` of ``output``, and the tensors in it, in the same order.

    ``expected(x)`` describes a tensor x of ``output``, and becomes its entry in the form.
    """
    leaves, spec = pytree.tree_flatten(output)
    expected_leaves: list[Expected | None] = []
    tensors = []
    for x in leaves:
        if x is None:
            expected_leaves.append(None)
        else:
            expected_leaves.append(expected(x))
            tensors.append(x)
    return _Form(expected_leaves, spec), tensors
