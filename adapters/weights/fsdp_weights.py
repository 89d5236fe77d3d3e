"""Weights sharded by FSDP2: the method ``"fsdp"`` of shard_weights, and the checks of calls with such weights.

``features.py`` finds :data:`FEATURE`; ``shard.py`` calls the method, and ``lora.py`` its functions for LoRAs.
The sharding itself is in ``para_core/weights/fsdp.py``. Tests: tests/weights/test_fsdp.py, and for the checks
tests/adapters/compatibility/test_checks.py, whose cases are named like the functions here, without
``check_``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import DTensor

from para_core.adapters.adapter import Adapter
from para_core.adapters.agree.loras import lora_weights
from para_core.adapters.inspect.components import blocks_of
from para_core.adapters.refusal import refusal
from para_core.adapters.registry import adapter_for
from para_core.adapters.weights.feature import Feature, ShardMethod
from para_core.cache.options import CacheOptions
from para_core.distributed.mesh import AnyMesh, GuidedMesh
from para_core.instance.modules import is_compiled
from para_core.plans.region import mesh_of_plan
from para_core.torch_internals import COMPILE_CONTEXT, COMPILED_CALL, compile_context
from para_core.weights.fsdp import (
    check_shardable,
    gathered_parameters,
    is_sharded,
    ranks_per_copy,
    shard_blocks,
    shard_mesh,
    sharded_parameters,
)
from para_core.weights.group import sequence_ranks, timeout_of, weights_mesh


def _check_fsdp_mesh(mesh: GuidedMesh, has_transformer: bool) -> None:
    """Refuse a mesh with tensor ranks for transformers, and one with a single rank per sequence."""
    if has_transformer and mesh.tensor.size > 1:
        raise ValueError(
            f"the mesh has {mesh.tensor.size} ranks along 'tensor', which share the heads of a transformer, "
            "and weights are to be sharded by method='fsdp'. Use method='tensor' (text encoders: "
            "shard_weights(pipe, mesh, components=['text_encoder', ...])), or a mesh without 'tensor'."
        )
    if mesh.sequence.ranks == 1:
        raise ValueError(
            f"the mesh has {mesh.batch.size} × 1 ranks (batch × sequence), and weights are sharded over the "
            "sequence ranks: there is nothing to share. Give the ranks to the sequence ('ulysses', 'ring') instead of "
            "'batch' (max_batch_dim_size=1) or 'tensor', or leave the weights whole."
        )


def _check_fsdp_component(name: str, module: nn.Module, ranks: AnyMesh, adapter: Adapter | None) -> None:
    check_shardable(module, _replicated_parameters(module, adapter))


def _make_fsdp_mesh(mesh: GuidedMesh) -> DeviceMesh:
    """Return a mesh of the sequence ranks of ``mesh``. Collective."""
    sequence = mesh.sequence
    return weights_mesh(sequence_ranks(sequence), sequence.device_type, timeout=timeout_of(sequence))


def _shard_by_fsdp(
    module: nn.Module, mesh: DeviceMesh, offload_policy: OffloadPolicy | None, adapter: Adapter | None
) -> None:
    replicated = _replicated_parameters(module, adapter)
    shard_blocks(module, blocks_of(module), mesh, offload_policy=offload_policy, replicated=replicated)


def _replicated_parameters(module: nn.Module, adapter: Adapter | None) -> list[nn.Parameter]:
    """Return the parameters that FSDP2 leaves on every rank: those of LoRAs, and of
    ``Adapter.called_outside``. ``adapter`` is the one that the user passed.
    """
    adapter = adapter_for(module, adapter)
    names = () if adapter is None else adapter.called_outside
    return [*lora_weights(module), *(x for name in names for x in module.get_submodule(name).parameters())]


@contextmanager
def _gather_layers(module: nn.Module, layers: Sequence[nn.Module]) -> Iterator[None]:
    """Gather the sharded weights of ``layers`` inside the ``with`` block. Collective."""
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(gathered_parameters(layer, sharded_parameters(layer)))
        yield


def _place_loras(module: nn.Module) -> None:
    """Move LoRAs to the device of the mesh: peft creates them in host memory if the weights are offloaded to
    it. FSDP2 shards none of them, so each rank holds all.
    """
    mesh = shard_mesh(module)
    if mesh is not None and mesh.device_type != "cpu":
        for weight in lora_weights(module):
            weight.data = weight.data.to(mesh.device_type)


def check_shards_in_sequence(module: nn.Module, name: str) -> None:
    """Refuse weights sharded over ranks that may run different blocks.

    Only their numbers are compared: that these ranks are those of the sequence is left to the user. A model
    is not checked if the user has sharded only its blocks.
    """
    # Test the class first: each call of a model asks this, and ranks_per_copy looks at all parameters.
    if not is_sharded(module):
        return
    num_sharing = ranks_per_copy(module)
    applied = mesh_of_plan(module)
    num_in_sequence = 1
    if applied is not None:
        num_in_sequence = applied.ranks
    if num_sharing > num_in_sequence:
        raise refusal(
            RuntimeError,
            f"{name} has its weights sharded over {num_sharing} ranks, and its sequence over "
            f"{num_in_sequence}. The other ranks may run other blocks, for another branch of guidance or "
            "because a cache skips other steps, and ranks would wait for each other.",
            "Load the pipeline again, and shard weights over the sequence ranks: shard_weights(pipe, mesh) "
            "with the mesh of parallelize_pipe.",
        )


def check_fullgraph_of_shards(module: nn.Module, name: str, called: Any) -> None:
    """Refuse one graph (fullgraph=True) for a model whose weights are sharded by FSDP2."""
    if is_sharded(module) and (_is_compiled_without_breaks(called) or _is_compiled_without_breaks(module)):
        raise refusal(
            RuntimeError,
            f"{name} is compiled with fullgraph=True, and its weights are sharded (weights='fsdp'). FSDP2 "
            "gathers the weights of each block in a hook, where the graph breaks.",
            f"Compile its blocks: {name}.compile_repeated_blocks(fullgraph=True); or leave fullgraph=True out.",
        )


def _is_compiled_without_breaks(module: Any) -> bool:
    """Whether ``module`` itself was compiled with ``fullgraph=True``, by ``torch.compile`` or in place."""
    state = module.__dict__
    contexts = [state.get(COMPILE_CONTEXT)]
    contexts += [compile_context(compiled) for compiled in (state.get(COMPILED_CALL), state.get("forward"))]
    return any(getattr(context, "fullgraph", False) for context in contexts)


def check_cached_graph_of_shards(module: nn.Module, name: str, called: Any) -> None:
    """Refuse a cache in a model that is compiled as one graph and whose weights are sharded by FSDP2."""
    if is_sharded(module) and (called is not module or is_compiled(module)):
        raise refusal(
            RuntimeError,
            f"{name} is compiled as one graph, with a cache, and its weights are sharded (weights='fsdp'). "
            "The branches of torch.cond support no hooks of FSDP2.",
            f"Compile its blocks: {name}.compile_repeated_blocks(fullgraph=True); or leave out one of the three.",
        )


def check_late_quantization(module: nn.Module, name: str) -> None:
    """Refuse weights that were quantized after FSDP2 sharded them.

    Small weights outside the blocks, which FSDP2 does not shard, are refused as well if they were quantized
    before.
    """
    if not is_sharded(module):
        return
    for path, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter and not isinstance(parameter, DTensor):
            raise RuntimeError(
                f"{path} of {name} is a {type(parameter).__name__} that FSDP2 does not shard: it became one after "
                "FSDP2 sharded the weights, and would restore the old weight, or it is too small to be sharded. Load "
                "the pipeline again, and quantize the blocks before sharding (int8_weight_only_quantized_training()), "
                "or after weights='tensor'."
            )


def _check_call_of_shards(module: nn.Module, name: str, called: Any, mesh: GuidedMesh) -> None:
    # Without a batch dim, other ranks that share the weights run the same blocks in each call.
    if mesh.batch.size > 1:
        check_shards_in_sequence(module, name)
    check_fullgraph_of_shards(module, name, called)
    check_late_quantization(module, name)


def _check_cached_call_of_shards(module: nn.Module, name: str, called: Any, options: CacheOptions) -> None:
    # With any mesh, because caches of other sequences may skip other steps.
    check_shards_in_sequence(module, name)
    check_cached_graph_of_shards(module, name, called)
    check_late_quantization(module, name)


FEATURE = Feature(
    method=ShardMethod(
        check_mesh=_check_fsdp_mesh,
        check_component=_check_fsdp_component,
        make_mesh=_make_fsdp_mesh,
        shard=_shard_by_fsdp,
        mesh_of=shard_mesh,
        gather_layers=_gather_layers,
        shard_loras=_place_loras,
        shards_encoders=True,
        takes_any_mesh=True,
        takes_offload_policy=True,
        quantizes_first=True,
        keeps_bits=True,
    ),
    call_checks=(_check_call_of_shards,),
    cached_call_checks=(_check_cached_call_of_shards,),
)
