"""Kinds of denoisers that are no transformers. A kind is a file with a constant ``KIND``, and a line of ``KINDS``.

Code for pipelines reaches a kind by that line alone. Only the public functions for a UNet without a pipeline
(``adapters/api.py``, ``adapters/parallel/unet.py``) import the file of their kind.

``registry.py``, all rooms of ``adapters`` and ``fleet/encode_first.py`` ask here for the denoisers of a
pipeline and for what is particular to their kind. The only kind is in ``adapters/vae/unet.py``. Tests:
tests/spatial/test_unet_pipelines.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Protocol, cast

from torch import nn

from para_core.distributed.mesh import GuidedMesh, SequenceMesh
from para_core.instance.record import slot_owner
from para_core.instance.slots import Slot

# Each module has a constant KIND, a DenoiserKind.
KINDS = (
    "para_core.adapters.vae.unet",
)  # fmt: skip


class DenoiserRun(Protocol):
    """The handler of the calls of one denoiser on several ranks."""

    mesh: GuidedMesh
    # True while the caller guarantees that all ranks have equal inputs. The inputs are not compared again
    # then. Set from outside, by assume_agreed().
    inputs_agreed: bool

    def apply(self) -> None:
        """Wrap the denoiser, and replace an earlier wrapper. On one rank, only remove it."""

    def remove(self) -> None:
        """Undo :meth:`apply`."""


class MakeRun(Protocol):
    """Return the handler that will run ``module`` over ``mesh``. Changes nothing of the module yet.

    Collective: it may create process groups, so it is not called inside of
    :func:`~para_core.distributed.agree.together`, where a rank may have failed alone.

    ``agree_on_inputs`` is called with the named arguments of each call, and raises if ranks differ.
    ``batched`` says whether samples are sharded over ``batch``.
    """

    def __call__(
        self,
        module: nn.Module,
        mesh: GuidedMesh,
        *,
        batched: bool,
        agree_on_inputs: Callable[[Mapping[str, Any]], None],
    ) -> DenoiserRun: ...


@dataclass(frozen=True)
class DenoiserKind:
    """One kind of denoiser that is no transformer.

    Args:
        name: The kind in messages.
        find: Returns the denoisers of this kind in a pipeline by path; empty if it has none. It may return
            an unsupported one, for which :func:`kind_of` is None, so that ``check_parallelize`` refuses the
            pipeline and says why.
        describes: Whether a module is a supported denoiser of this kind.
        make_run: Returns the handler of its calls.
        why_no_stages: Why its blocks cannot be distributed over stages.
        pipelines: Names of the pipelines with such a denoiser, for messages, by the name of its class.
        check_components: Returns whether the components of a pipeline that is not loaded yet, classes by
            name, contain a denoiser of this kind. Raises ``TypeError``, which names the pipeline, if its
            class is not supported.
        check_parallelize: ``check_parallelize(owner, module, mesh)`` runs the checks of the kind before
            ``module`` is parallelized. ``owner`` is its pipeline, or ``module`` itself. It is called twice,
            first with None for ``mesh``, before a mesh is made, and then with the mesh; so it changes nothing.
        check_parallel_call: ``check_parallel_call(module, name, called)`` runs those before each parallel
            call. ``name`` is that in messages. ``called`` is the object that the pipeline calls: ``module``,
            or the wrapper of ``torch.compile`` around it.
        check_cache: ``check_cache(owner, module)`` runs those before a cache is applied.
    """

    name: str
    find: Callable[[Any], dict[str, nn.Module]]
    describes: Callable[[Any], bool]
    make_run: MakeRun
    why_no_stages: str
    pipelines: Mapping[str, str]
    check_components: Callable[[str, Mapping[str, Any]], bool]
    check_parallelize: Callable[[Any, Any, GuidedMesh | None], None]
    check_parallel_call: Callable[[nn.Module, str, Any], None]
    check_cache: Callable[[Any, nn.Module], None]


@cache
def denoiser_kinds() -> tuple[DenoiserKind, ...]:
    """Return the kinds of ``KINDS``, in that order."""
    return tuple(import_module(name).KIND for name in KINDS)


def kind_of(module: Any) -> DenoiserKind | None:
    """Return the kind of a supported denoiser; None for transformers and what is not supported."""
    return next((kind for kind in denoiser_kinds() if kind.describes(module)), None)


def denoisers_by_kind(pipe: Any) -> list[tuple[DenoiserKind, str, nn.Module]]:
    """Return the kind, path and module of each denoiser of ``pipe`` that is no transformer."""
    return [(kind, path, module) for kind in denoiser_kinds() for path, module in kind.find(pipe).items()]


def other_denoisers_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the denoisers of ``pipe`` that are no transformers by path; empty for a pipeline with a transformer."""
    return {path: module for _, path, module in denoisers_by_kind(pipe)}


def denoiser_run_of(module: Any) -> DenoiserRun | None:
    """Return the handler that runs ``module`` on several ranks; None if there is none."""
    return cast("DenoiserRun | None", slot_owner(module, Slot.PARALLEL_DENOISER, object))


def mesh_of_denoiser(module: Any) -> SequenceMesh | None:
    """Return the ranks that share the rows of a parallel denoiser: this rank alone if only samples are sharded.

    None if the denoiser is not parallel.
    """
    run = denoiser_run_of(module)
    if run is None:
        return None
    return run.mesh.sequence
