"""The parts of an optional feature: a method of sharding weights, changes of a pipeline, checks, a quantizer.

Here are only the types. Each feature fills them in its own file as ``FEATURE``, and ``features.py`` finds
these files; the callers of each field are named there and below. Tests: tests/weights/,
tests/test_lift_out.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy

from para_core.adapters.adapter import Adapter
from para_core.cache.options import CacheOptions
from para_core.distributed.agreed_inputs import AgreeOnInputs
from para_core.distributed.mesh import AnyMesh, GuidedMesh, MeshDim
from para_core.instance.slots import Slot
from para_core.spatial.mode import SpatialShardMode

# Names of methods of sharding, for signatures. The methods that exist are those of the features.
WeightsMethod = Literal["fsdp", "tensor"]


@dataclass(frozen=True)
class ShardMethod:
    """A way in which ranks share the weights of a component: a value of ``weights=`` and of ``method=``.

    Args:
        check_mesh: Called with a mesh, and whether a transformer is among the components; raises
            ``ValueError`` if it cannot shard weights over this mesh.
        check_component: Called with the name of a component, the component, the ranks and the adapter that
            the user passed, or None; raises ``ValueError`` if it cannot shard the component.
        make_mesh: Returns the mesh of the ranks that share weights, of a mesh that ``check_mesh`` has passed.
            Collective.
        shard: Shards a component in place over that mesh, with that adapter. Nothing undoes it.
        mesh_of: Returns the mesh over which this method has sharded a module; None if it has not.
        gather_layers: Called with a sharded component and some of its layers; returns a context in which each
            rank has all values of their weights, and may write to them (the same values on all ranks), as
            merging a LoRA does. Collective.
        shard_loras: Shards or places the LoRAs that were added to a sharded component. Raises ``ValueError``,
            and changes nothing, if it cannot shard one of them.
        can_move: Whether ``to`` of a sharded component may change its dtype or the type of its device.
        shards_encoders: Whether it shards text encoders, too.
        takes_any_mesh: Whether ``shard`` takes a `DeviceMesh` without the dims of this library as it is.
            ``make_mesh`` and ``check_mesh`` are then left out.
        takes_offload_policy: Whether it takes an `OffloadPolicy`.
        quantizes_first: Whether weights are quantized before they are sharded, as shards cannot be.
        keeps_bits: Whether results have the bits of replicated weights.
    """

    check_mesh: Callable[[GuidedMesh, bool], None]
    check_component: Callable[[str, nn.Module, AnyMesh, Adapter | None], None]
    make_mesh: Callable[[GuidedMesh], DeviceMesh]
    shard: Callable[[nn.Module, DeviceMesh, OffloadPolicy | None, Adapter | None], None]
    mesh_of: Callable[[nn.Module], DeviceMesh | None]
    gather_layers: Callable[[nn.Module, Sequence[nn.Module]], AbstractContextManager[None]]
    shard_loras: Callable[[nn.Module], None]
    can_move: bool = False
    shards_encoders: bool = False
    takes_any_mesh: bool = False
    takes_offload_policy: bool = False
    quantizes_first: bool = False
    keeps_bits: bool = False


@dataclass(frozen=True)
class ChangeRequest:
    """The arguments of parallelize_pipe or parallelize_transformer for the features.

    Each option is valid by itself; whether options fit each other, the mesh and the models is for the
    features to check.

    Args:
        owner: The pipeline, or the transformer that is parallelized without one.
        transformers: The transformers by component name. Without a pipeline the name is empty.
        mesh: The ranks.
        options: The options by name. Those that the function does not have are missing.
        agree_on_inputs: Returns the comparison of the arguments of a transformer's calls over the ranks.
        has_calls_per_branch: Whether the pipeline calls its transformer once per CFG branch, so that the
            ranks along ``batch`` cannot share the samples of one call.
    """

    owner: Any
    transformers: Mapping[str, nn.Module]
    mesh: GuidedMesh
    options: Mapping[str, Any]
    agree_on_inputs: Callable[[nn.Module], AgreeOnInputs]
    has_calls_per_branch: bool = False

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that the user passed; None without one."""
        adapter: Adapter | None = self.options.get("adapter")
        return adapter

    @property
    def transformers_by_path(self) -> dict[str, nn.Module]:
        """The transformers by their names in messages: ``pipe.transformer``, without a pipeline ``transformer``."""
        by_path = {}
        for name, module in self.transformers.items():
            path = "transformer"
            if name:
                path = f"pipe.{name}"
            by_path[path] = module
        return by_path


class FeatureChange:
    """A change that a feature makes.

    The methods here do nothing, for features that do not need one of them. A session calls them on all ranks
    (``FeaturePart`` in ``adapters/parallel/parts.py``), except :meth:`generation`, which the call of the
    pipeline enters (``adapters/parallel/call.py``).
    """

    # Name of the change in error messages.
    name = "a change"
    # Whether ranks reach the steps of a generation at different times, so that callbacks cannot be compared.
    overlaps_steps = False

    def apply(self) -> None:
        """Make the part of the change that :meth:`undo` undoes.

        If it raises, it has changed nothing but slots, which the session restores
        (:func:`~para_core.adapters.parallel.session.replace_session`). Weights are freed or sharded only in
        :meth:`complete`, because nothing undoes that.
        """

    def undo(self) -> None:
        """Undo :meth:`apply`."""

    def resume(self) -> None:
        """Make the change again, except for slots, if a session that should have replaced it has failed.

        Called after :meth:`undo`, and before the caller restores the slots, so this may fill them.
        """

    def complete(self) -> None:
        """Make the part of the change that nothing undoes, after all ranks have applied all changes.

        All ranks call it, and if it fails on one of them, it must raise on all (:mod:`.one_way`).
        """

    def generation(self, pipe: Any, kwargs: dict[str, Any]) -> AbstractContextManager[dict[str, Any]]:
        """Return a context in which each generation of ``pipe`` runs.

        It yields the keyword arguments for the call of ``pipe``: ``kwargs``, perhaps with other callbacks.
        """
        return nullcontext(kwargs)


# Makes the mode under which the given ranks compute the rows of one call.
ImageModes = Callable[[MeshDim], SpatialShardMode]

# A check raises if a feature does not go with what the user asks for. Its docstring begins with "Refuse".
# Called with the model, its name in messages, the mesh and the adapter that the user passed.
ParallelizeCheck = Callable[[nn.Module, str, GuidedMesh, Adapter | None], None]
# Called with the model, its name in messages, the component that the pipeline calls, and the mesh.
CallCheck = Callable[[nn.Module, str, Any, GuidedMesh], None]
# Called with the model, its name in messages, the component that the pipeline calls, and the options of the
# cache.
CachedCallCheck = Callable[[nn.Module, str, Any, CacheOptions], None]


@dataclass(frozen=True)
class Quantizer:
    """A way to quantize weights.

    Args:
        check_scheme: Called with a scheme, a value of ``quantize=``; raises ``ImportError`` if it needs a
            package that is not installed.
        quantize: Called with a pipeline and a scheme; quantizes the transformers in place. With
            ``gatherable=True`` it uses a format that FSDP2 can gather.
        loading_config: Called with a scheme; returns the ``quantization_config`` of ``from_pretrained``.
        cast_linears: Called with a module, a dtype and a set of names; casts the weights of linear layers,
            except in the modules with these names.
    """

    check_scheme: Callable[[Any], Any]
    quantize: Callable[..., None]
    loading_config: Callable[..., Any]
    cast_linears: Callable[..., None]


@dataclass(frozen=True)
class Feature:
    """An optional feature of a parallel pipeline: its own files, and one line in :data:`~.features.FEATURES`.

    Args:
        option: The option of parallelize_pipe that turns it on, if it has one of its own.
        mesh_dim: The name of the mesh dim along which ranks hold different parts of weights, or compute
            different calls, if it has one of its own.
        method: The way in which it shards weights. Its name is that of the feature.
        changes: Returns the changes that it makes for a request. Raises if the request does not fit, and
            changes nothing itself.
        has_freed: Whether this rank lacks weights of a module because the feature has freed them. Sharded
            weights are known without it.
        parallelize_checks, call_checks, cached_call_checks: The checks before a model is parallelized, before
            a parallel call, and before a cached call.
        quantizer: The way in which it quantizes weights.
        image_modes: Returns what makes the mode of each call of an autoencoder whose rows are sharded, in
            place of the usual one.
        transformer_slots: The slots of a transformer that its changes fill, and that must not outlive the
            plan of that transformer. Whatever removes the plan empties them: a transformer without a pipeline
            has no session that would undo the changes.
    """

    option: str | None = None
    mesh_dim: str | None = None
    method: ShardMethod | None = None
    changes: Callable[[ChangeRequest], Sequence[FeatureChange]] | None = None
    has_freed: Callable[[nn.Module], bool] | None = None
    parallelize_checks: Sequence[ParallelizeCheck] = ()
    call_checks: Sequence[CallCheck] = ()
    cached_call_checks: Sequence[CachedCallCheck] = ()
    quantizer: Quantizer | None = None
    image_modes: Callable[[], ImageModes] | None = None
    transformer_slots: Sequence[Slot] = ()
