"""Run changes of weights that nothing undoes (shards, stages), and refuse what needs all weights afterwards.

:func:`one_way` runs such a change. If it fails half-way, the pipeline and its models are marked as unusable.
The checks here raise for such a pipeline, and for one that has split weights if all are needed, with the
advice to load it again: nothing gathers weights again. Tests: tests/weights/test_load.py, failures in
``use_after_failure``, and the checks in ``settings_after``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from para_core.adapters.weights.features import features
from para_core.adapters.weights.sharded_component import sharded_component
from para_core.distributed.agree import together
from para_core.distributed.mesh import AnyMesh
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import unwrapped_class
from para_core.instance.record import fill_slot, slot_owner
from para_core.instance.slots import Slot


def load_again(owner: Any) -> str:
    """Return the sentence of messages that says how ``owner``, a pipeline or a model, is loaded again."""
    kind = "model" if isinstance(owner, nn.Module) else "pipeline"
    return f"Load the {kind} again: {unwrapped_class(owner).__name__}.from_pretrained(...)."


def is_split(module: nn.Module) -> bool:
    """Whether para_core has split or freed weights of ``module``, which nothing undoes.

    Weights that the user sharded without para_core do not count: para_core has no part in them.
    """
    has_freed = [feature.has_freed for feature in features().values() if feature.has_freed is not None]
    return sharded_component(module) is not None or any(check(module) for check in has_freed)


def check_can_be_undone(owner: Any) -> None:
    """Raise ``RuntimeError`` if weights of ``owner``, a pipeline or a model, are split, or a change of them
    has failed.
    """
    check_usable(owner)
    for name, module in _modules_of(owner).items():
        if is_split(module):
            raise RuntimeError(
                f"{name} holds a part of its weights on each rank (weights in shards or in stages), and "
                f"nothing gathers them again, so this cannot be undone. {load_again(owner)} To replace other "
                "options, parallelize it again on the same mesh, a pipeline with the same weights= and "
                "text_encoders=."
            )


def check_holds_all(owner: Any, modules: Iterable[nn.Module], wanted: str) -> None:
    """Raise ``RuntimeError`` if the weights of one of ``modules`` are split, because ``wanted`` needs all of
    them.

    ``wanted`` is the option of ``owner`` that asks for it, such as ``"weights='replicate'"``.
    """
    for module in modules:
        if is_split(module):
            raise RuntimeError(
                f"{wanted} needs all weights of the {unwrapped_class(module).__name__}, of which each rank "
                f"holds a part, and nothing gathers them again. {load_again(owner)} Or leave {wanted} out."
            )


def check_usable(owner: Any) -> None:
    """Raise ``RuntimeError`` if a change of weights of ``owner``, a pipeline or a model, has failed half-way."""
    for instance in (owner, *_modules_of(owner).values()):
        message = slot_owner(instance, Slot.UNUSABLE, str)
        if message is not None:
            raise RuntimeError(message)


@contextmanager
def one_way(owner: Any, modules: Iterable[nn.Module], ranks: AnyMesh, what: str) -> Iterator[None]:
    """Run a change of the weights of ``modules`` in the ``with`` block. Collective.

    ``owner`` is the pipeline whose components they are, or their model itself.

    If it fails on one rank, every rank raises ``RuntimeError``, and so do later calls of ``owner`` and
    ``modules``: they have :attr:`Slot.UNUSABLE`, whose owner is the message, which :func:`check_usable`
    reads. After an interrupt (``KeyboardInterrupt``) the ranks do not meet, and only this rank's instances
    are marked. ``what`` names the change in messages, such as ``"sharding the weights"``.

    Do not call it inside :func:`together`: its error is not marked as raised on all ranks, so an outer
    ``together()`` would exchange it once more.
    """
    try:
        with together(ranks, f"{what} failed"):
            yield
    except BaseException as error:
        message = (
            f"{what} of this {unwrapped_class(owner).__name__} failed half-way ({type(error).__name__}: "
            f"{error}), so its weights are incomplete. {load_again(owner)}"
        )
        for instance in (owner, *modules):
            fill_slot(instance, Slot.UNUSABLE, {"__call__": partial(_raise_unusable, message)}, owner=message)
        if isinstance(error, Exception):
            raise RuntimeError(message) from error
        raise


def _raise_unusable(
    message: str, call: Callable[..., Any], instance: Any, /, *args: Any, **kwargs: Any
) -> Any:
    raise RuntimeError(message)


def _modules_of(owner: Any) -> dict[str, nn.Module]:
    """Return the modules of ``owner``, a pipeline or a model, by their names in messages.

    Of a model these are itself and its children. Weights are split, and modules marked, only as components of
    a pipeline or as the model that the user passed (``Sharding.run`` of ``shard.py``, ``StageChange`` of
    ``staged_transformer.py``), so a deeper module has neither. Children count, because a pipeline may be a
    module that keeps its components as children.
    """
    parts = {f"pipe.{name}": part for name, part in vars(owner).items()}
    if isinstance(owner, nn.Module):
        parts = {"the model": owner, **{f"its {name}": part for name, part in owner.named_children()}}
    return {name: uncompiled(part) for name, part in parts.items() if isinstance(part, nn.Module)}
