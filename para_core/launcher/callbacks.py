"""Callbacks of the caller, on both ends: a rank asks the caller to run them, and repeats what they did.

The arguments, with all tensors, travel to the caller. The result, the tensors that the callback changed in
place, the attributes that it set on the pipeline, and the state of random generators travel back to all
ranks.

On a rank, ``rank.py`` passes a :class:`Relay` to the pipeline; in the caller, ``running_call.py`` calls
:func:`run_callback`. Tests: tests/launcher/test_callbacks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from para_core.launcher.connection import CallerConnection
from para_core.launcher.errors import Cancelled
from para_core.launcher.messages import CallbackArguments, CallbackReply, PipeArgument, SentTensor
from para_core.launcher.randomness import CallerSeeds, random_state_of_rank, set_random_state
from para_core.launcher.steps import pipelines_of
from para_core.launcher.wire import Body

_PLAIN = (bool, int, float, str, type(None))


def runs_in_caller(name: str, value: Any) -> bool:
    """Whether the argument ``name`` of a pipeline's call is a callback that runs in the caller.

    Names contain ``callback``: combined pipelines have ``prior_callback_on_step_end``, too. diffusers' own
    callback objects, such as ``SDCFGCutoffCallback``, run on the ranks: they call methods of the pipeline.

    Raises:
        TypeError: The argument has several functions.
    """
    if "callback" not in name:
        return False
    if isinstance(value, (list, tuple)) and any(map(callable, value)):
        raise TypeError(f"{name} has several functions; expected one function, which calls them.")
    if not callable(value):
        return False
    callbacks = getattr(value, "callbacks", None) or [value]
    return not all(type(callback).__module__.startswith("diffusers.") for callback in callbacks)


def name_callbacks(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with positional callbacks, and all arguments after them, as keyword
    arguments.

    ``parameters`` are the names of the positional parameters.

    Raises:
        TypeError: An argument after a callback has no parameter, or ``kwargs`` has it too.
    """
    for index, (name, value) in enumerate(zip(parameters, args, strict=False)):
        if runs_in_caller(name, value):
            if len(args) > len(parameters):
                raise TypeError(
                    f"the call got {len(args)} positional arguments; expected at most {len(parameters)}."
                )
            named = dict(zip(parameters[index:], args[index:], strict=False))
            if repeated := sorted(named.keys() & kwargs.keys()):
                raise TypeError(f"the call got two values for {', '.join(repeated)}; expected one.")
            return args[:index], {**named, **kwargs}
    return args, dict(kwargs)


def take_out_callbacks(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    """Return the arguments of a call without the caller's callbacks, and the callbacks by name.

    A callback object names the tensors that it wants (``tensor_inputs``). The :class:`Relay` in its place
    does not, so the pipeline gets the names as the argument ``…_tensor_inputs``.
    """
    callbacks = {name: value for name, value in kwargs.items() if runs_in_caller(name, value)}
    rest = {name: value for name, value in kwargs.items() if name not in callbacks}
    for name, callback in callbacks.items():
        if hasattr(callback, "tensor_inputs"):
            rest[f"{name}_tensor_inputs"] = list(callback.tensor_inputs)
    return rest, callbacks


# -- On a rank.


class Relay:
    """A callback on a rank that lets the caller run its callback ``name``, and repeats its effect here.

    Every rank calls it, with equal arguments. The first one sends them to the caller, which answers all
    ranks.
    """

    def __init__(self, connection: CallerConnection, pipe: Any, name: str, generators: Sequence[Any]) -> None:
        self._connection, self._pipe, self._name, self._generators = connection, pipe, name, generators

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pipe = self._pipe
        for inner in pipelines_of(self._pipe):
            # A combined pipeline passes its callbacks on to inner ones, which call them with themselves.
            if any(value is inner for value in args):
                pipe = inner
        sent_args, sent_kwargs = _map_nested(
            (args, kwargs), lambda value: PipeArgument() if value is pipe else value
        )
        arguments = CallbackArguments(
            sent_args, sent_kwargs, readable_attributes(pipe), random_state_of_rank(self._generators)
        )
        if self._connection.rank == 0:
            self._connection.report("callback", self._name, body=_body_of(arguments))
        reply: CallbackReply = self._connection.replies.get().load()
        if reply.raised:
            raise Cancelled("the callback raised in the caller.")
        set_random_state(reply.random)
        for generator, state in zip(self._generators, reply.random.generators, strict=False):
            generator.set_state(state)
        tensors = _tensors_in((args, kwargs))
        for index, changed in reply.edits.items():
            _assign(tensors[index], changed)
        for name, value in reply.attributes.items():
            setattr(pipe, name, value)
        return _map_nested(reply.returned, lambda value: _value_on_rank(value, tensors))


def _body_of(arguments: CallbackArguments) -> Body:
    """Return the pickled arguments, or the reason why they cannot be sent: the caller raises it, and answers
    all ranks. This rank must not raise alone.
    """
    try:
        return Body.of(arguments)
    except (TypeError, OSError) as error:
        return Body.of(error)


def _assign(tensor: Any, changed: Any) -> None:
    import torch

    with torch.no_grad():
        tensor.copy_(changed)


def _value_on_rank(value: Any, tensors: list[Any]) -> Any:
    """Return the rank's value for a ``value`` that the callback returned.

    A tensor that was an argument is that one of ``tensors``; another tensor goes to the device of the first
    of them.
    """
    if isinstance(value, SentTensor):
        return tensors[value.index]
    return value.to(tensors[0].device) if _is_tensor(value) and tensors else value


def readable_attributes(pipe: Any) -> dict[str, Any]:
    """Return the attributes of a pipeline that are numbers, strings, booleans or None, properties included."""
    names = [name for name in dir(type(pipe)) if isinstance(getattr(type(pipe), name, None), property)]
    values = {name: value for name, value in vars(pipe).items() if isinstance(value, _PLAIN)}
    for name in names:
        try:
            value = getattr(pipe, name)
        # A property may raise anything before the call has set what it reads.
        except Exception:
            continue
        if isinstance(value, _PLAIN):
            values[name] = value
    return values


# -- In the caller.


class CallbackPipe:
    """The pipeline argument of a callback in the caller. The pipeline's plain attributes can be read and set.

    Setting ``_guidance_scale`` changes ``guidance_scale``, too. Other properties that are computed from it,
    such as ``do_classifier_free_guidance``, keep their values until the next callback. Its own state is in
    ``vars(self)``, because attributes are those of the pipeline.
    """

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        vars(self)["_attributes"], vars(self)["_changes"], vars(self)["_ended"] = dict(attributes), {}, False

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["_attributes"][name]
        except KeyError:
            raise AttributeError(_not_here(name)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        attributes = vars(self)["_attributes"]
        if vars(self)["_ended"]:
            raise AttributeError(
                f"{name!r}: the callback that got this pipeline has ended. Use run of the handle."
            )
        if name not in attributes or not isinstance(value, _PLAIN):
            raise AttributeError(_not_here(name))
        public = name.removeprefix("_")
        if public != name and public in attributes and attributes[public] == attributes[name]:
            # ``guidance_scale`` is a property that returns ``_guidance_scale``.
            attributes[public] = value
        attributes[name] = vars(self)["_changes"][name] = value


def _not_here(name: str) -> str:
    return (
        f"{name!r}: the pipeline is on the ranks, and a callback can read and set only those of its attributes that "
        f"are numbers, strings or booleans. After the call, run(lambda pipe: pipe.{name}) reaches all others."
    )


def run_callback(
    callback: Callable[..., Any], body: Body, seeds: CallerSeeds, generators: Sequence[Any]
) -> CallbackReply:
    """Run a callback with the arguments that a rank sent, and return its effect. Raise what the callback
    raises, or the reason why the rank could not send the arguments.

    ``generators`` are those among the call's arguments. They, and the default generator, continue from the
    rank's.
    """
    arguments = body.load()
    if isinstance(arguments, Exception):
        raise arguments
    # A second copy, to see which tensors the callback changes in place.
    unchanged: CallbackArguments = body.load()
    sent, originals = (_tensors_in((x.args, x.kwargs)) for x in (arguments, unchanged))
    pipe = CallbackPipe(arguments.attributes)
    args, kwargs = _map_nested(
        (arguments.args, arguments.kwargs), lambda value: pipe if isinstance(value, PipeArgument) else value
    )
    seeds.continue_from(arguments.random, generators)
    try:
        returned = callback(*args, **kwargs)
    finally:
        vars(pipe)["_ended"] = True
    numbers = {id(tensor): SentTensor(index) for index, tensor in enumerate(sent)}
    edits = {
        i: now
        for i, (now, before) in enumerate(zip(sent, originals, strict=True))
        if not _same_bits(now, before)
    }
    reply = _map_nested(returned, lambda value: numbers.get(id(value), value))
    return CallbackReply(reply, edits, vars(pipe)["_changes"], seeds.state_for_call(generators))


def _same_bits(a: Any, b: Any) -> bool:
    import torch

    same_form = a.shape == b.shape and a.dtype == b.dtype
    return same_form and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _tensors_in(value: Any) -> list[Any]:
    """Return the tensors in nested tuples, lists and dicts, in the order by which both ends number them."""
    tensors = list[Any]()

    def collect(item: Any) -> Any:
        if _is_tensor(item):
            tensors.append(item)
        return item

    _map_nested(value, collect)
    return tensors


def _map_nested(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``convert`` applied to what is in its tuples, lists and dicts, however nested, in
    order. Named tuples, and other classes derived from tuple or list, count as one value.
    """
    if isinstance(value, dict):
        return {key: _map_nested(item, convert) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_nested(item, convert) for item in value)
    return convert(value)
