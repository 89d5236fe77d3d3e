"""Contents of the messages between the caller and its ranks.

How they travel is in ``wire.py``. The caller sends LoadJob, Call and CallbackReply; ranks send Outcome,
RankError and CallbackArguments. The head of a message is a tuple that begins with its kind: ``rank.py`` has those
that a rank reads, ``running_call.py`` those that it sends. Tests: tests/launcher/test_calls.py,
tests/launcher/test_callbacks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from para_core.launcher.thread_state import CallerThreadState
from para_core.launcher.wire import Body

# The number of the call in which ranks load the pipeline. Later calls count up from it.
LOADING = 0


@dataclass(frozen=True)
class RandomState:
    """State of torch's random numbers in a process."""

    cpu: Any = None  # state of the default generator of the CPU; None if torch is not imported
    cuda: Any = None  # state of the default generator of CUDA; None if CUDA is not initialized
    cuda_seed: int | None = None  # the seed that a caller without CUDA has set since its last call
    generators: Sequence[Any] = ()  # states of the generators among a call's arguments


@dataclass(frozen=True)
class LoadJob:
    """The job with which a rank begins: load the pipeline."""

    load: Body  # the pickled function that returns the pipeline
    host: str  # address of the first rank's host
    timeout: float  # seconds after which a collective gives up
    random: RandomState


@dataclass(frozen=True)
class PipeDescription:
    """Description of the pipeline on the ranks, which the handle keeps."""

    name: str  # of its class
    methods: list[str]  # names of the public methods of its class
    parameters: list[str]  # names of the positional parameters of a call


@dataclass(frozen=True)
class Call:
    """A call of the pipeline, of a method of it, or of a function that gets it as its first argument."""

    # A function, the name of a method, or None for the pipeline itself.
    function: Callable[..., Any] | str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState
    thread: CallerThreadState  # of the calling thread
    generators: Sequence[Any] = ()  # those among the arguments
    callbacks: tuple[str, ...] = ()  # names of arguments that are functions of the caller
    linked: bool = False  # whether the function also gets the argument ``link``, a CallerLink


@dataclass(frozen=True)
class Outcome:
    """Result of a call or of loading on one rank."""

    value: Any
    random: RandomState
    modules: tuple[str, ...] = ()  # that the caller needs to load results
    error: Exception | None = None  # why the value cannot be sent; the call itself succeeded


@dataclass(frozen=True)
class RankError:
    """An exception that ended a call or loading on one rank."""

    pickled: Body  # the exception, which the rank could load; the caller may lack its class
    summary: str  # its type and text, without notes
    traceback: str
    random: RandomState  # after the exception

    def load_error(self) -> BaseException:
        """Return the exception; a RuntimeError with the summary if this process cannot load it."""
        try:
            error: BaseException = self.pickled.load()
        # Loading calls the exception's own methods.
        except Exception:
            return RuntimeError(self.summary)
        return error


@dataclass(frozen=True)
class CallbackArguments:
    """Arguments of a callback, which runs in the caller. :class:`PipeArgument` stands for the pipeline."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    attributes: dict[str, Any]  # plain attributes of the pipeline
    random: RandomState


@dataclass(frozen=True)
class CallbackReply:
    """Effect of a callback that ran in the caller."""

    returned: Any = None  # SentTensor stands for a tensor that was an argument
    edits: dict[int, Any] = field(default_factory=dict)  # tensors that were changed in place, by number
    attributes: dict[str, Any] = field(default_factory=dict)  # attributes that were set on the pipeline
    random: RandomState = RandomState()
    raised: bool = False


class PipeOfRank:
    """Placeholder for the pipeline in a result. The caller replaces it by its handle."""


class PipeArgument:
    """Placeholder for the pipeline among the arguments of a callback."""


@dataclass(frozen=True)
class SentTensor:
    """Placeholder for tensor number ``index`` among the arguments of a callback."""

    index: int
