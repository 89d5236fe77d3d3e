"""Public functions that run a diffusers pipeline on several ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, TypeVar

import torch

from para_core.adapters.adapter import Adapter, Text
from para_core.adapters.agree.options import equal_options
from para_core.adapters.compatibility.checks import check_parallelize, models_to_parallelize
from para_core.adapters.parallel.call import parallel_call, remove_parallel_call
from para_core.adapters.parallel.options import ParallelOptions, remove_from_transformer
from para_core.adapters.parallel.resolve import resolve
from para_core.adapters.parallel.session import replace_session
from para_core.adapters.planner.default_mesh import Mesh
from para_core.adapters.registry import require_kind, transformers_of, unets_of
from para_core.adapters.vae.unet import unparallelize_unet
from para_core.adapters.weights.feature import Method
from para_core.adapters.weights.one_way import check_can_be_undone, check_usable
from para_core.attention.local import AttnFunc
from para_core.attention.schedule import AttentionSchedule
from para_core.option_values import Backend, RotateMethod, TextEncoders, VaePlacement
from para_core.weights.pipefusion_options import PipeFusion

Pipeline = TypeVar("Pipeline")


def parallelize_pipe(
    pipe: Pipeline,
    *,
    mesh: Mesh | None = None,
    text: Text | None = None,
    timeout: timedelta | float | None = None,
    adapter: Adapter | None = None,
    assume_equal: bool = False,
    vae: bool = False,
    weights: Method | Literal["replicate"] | None = None,
    text_encoders: TextEncoders | None = None,
    vae_placement: VaePlacement | None = None,
    offload: Literal["blocks"] | None = None,
    resident_blocks: int | None = None,
    pipefusion: PipeFusion | None = None,
    rotate_method: RotateMethod | None = None,
    backend: Backend | AttentionSchedule | None = None,
    cross_backend: Backend | None = None,
    comm_dtype: torch.dtype | None = None,
    attn_func: AttnFunc | None = None,
    verify: bool = False,
) -> Pipeline:
    """Run a diffusers pipeline on all ranks of a mesh. The result equals that of one device up to floating-point order.

    Every rank of the mesh calls this function, and afterwards calls the pipeline with the same arguments; each gets the
    full result. Calling it again replaces the previous settings. :func:`unparallelize_pipe` restores the pipeline. If
    anything is invalid or fails on any rank, every rank raises, and the pipeline keeps its previous settings. Other
    pipelines are not changed.

    **Weights are one way.** Weights that were sharded (``weights``, ``text_encoders="fsdp"``) or freed (stages, along
    ``pipe``) are not gathered again. Another call may still replace all other options: leave ``weights`` and
    ``text_encoders`` out or pass them as before, with the same ranks along ``pipe``. Other values, and
    :func:`unparallelize_pipe`, raise: load the pipeline again. Weights change last, after everything is checked and
    applied on all ranks. If that fails on a rank, every rank raises, and the pipeline raises whenever it is used.

    Args:
        pipe (`DiffusionPipeline`): A pipeline with a supported transformer or UNet.
        mesh (`DeviceMesh` or `ProcessGroup`, *optional*): Ranks to use, with a ``ring`` or ``ulysses`` dim, or both; it
            may be a slice of a larger mesh. Ranks along ``batch`` compute different branches of guidance. Ranks along
            ``pipe`` hold consecutive transformer blocks and free the others (docs/stages.md), so move the pipeline to
            its device before. With a UNet, the ranks of the other dims shard the rows of its images. Defaults to all
            ranks, in the mesh that :func:`plan_mesh` predicts to be fastest at the pipeline's default sizes. If there
            is no prediction (unknown device or model, several hosts), two branches of guidance get half of the ranks
            each; the ranks of a branch go to Ulysses, up to the number of heads, then to the ring. Defaults to one rank
            if ``WORLD_SIZE`` is unset or 1. The choice is logged at level INFO.
        text (`"shard"` or `"replicate"`, *optional*): Whether text tokens are sharded like image tokens or kept on
            every rank. Both are exact. Defaults to the faster one for the model.
        timeout (`timedelta` or `float` in seconds, *optional*): How long the ranks of the mesh wait for a rank that
            does not answer; set on the process groups of the mesh. Afterwards gloo raises, and NCCL ends the process.
            If several pipelines set it on the same groups, the latest one that has not been undone is in effect.
            Defaults to leaving the time-outs of the groups unchanged.
        adapter (`Adapter`, *optional*): Facts about a transformer that is not supported. For a supported class it
            replaces the adapter of para_core.
        assume_equal (`bool`, defaults to `False`): Whether to skip the comparison of arguments over the ranks, made
            once per call. Arguments that differ then give wrong results or a hang. Random numbers are those of the
            first rank in both cases.
        vae (`bool`, defaults to `False`): Whether the autoencoders of images and of sound run on all ranks as well, as
            with :func:`parallelize_vae`.
        weights (`"fsdp"`, `"tensor"` or `"replicate"`, *optional*): How weights are distributed: sharded as by
            ``shard_weights(pipe, mesh, method=weights)``, or all of them on every rank. Defaults to leaving them as
            they are, sharded or not.
        text_encoders (`"replicate"`, `"fsdp"`, `"offload"` or `"first"`, *optional*): Where the weights of the text
            encoders are: on every rank; sharded over all ranks by FSDP2; in host memory, from which each layer is
            copied to the device while it runs; or the same, but only the first rank runs them and sends their outputs
            to the others. All are exact (docs/weights.md). Defaults to ``"fsdp"`` if ``weights`` shards the
            transformer, and to leaving them as they are otherwise.
        vae_placement (`"replicate"`, `"offload"` or `"first"`, *optional*): The same placements for the autoencoders of
            images and of sound. With ``vae=True`` all but ``"first"`` are possible. Defaults to leaving them as they
            are.
        offload (`"blocks"`, *optional*): Keeps the blocks of the transformers in host memory, also on one rank; each is
            copied to the device before it runs, and on CUDA while the block before it runs. Exact (docs/weights.md).
            Defaults to leaving them on the device.
        resident_blocks (`int`, *optional*): With ``offload``, the number of first blocks that stay on the device, by
            default 1. Without ``offload`` it is refused.
            A step that a cache skips copies nothing if these include the first blocks of the cache.
        pipefusion (`PipeFusion`, *optional*): Lets the stages of a mesh with ``pipe`` work at the same time, on patches
            that attend to keys of the previous step. **Not exact.** On a mesh without stages a single process can
            compute the same result (docs/stages.md). Defaults to exact stages.
        rotate_method (`"alltoall"`, `"allgather"` or `"2d"`, *optional*): How keys and values travel around the ring:
            from neighbour to neighbour; all at once; or in a grid of ring ranks, where queries travel along rows and
            keys along columns. All are exact. Defaults to ``"alltoall"``, or to the prediction of :func:`plan_mesh` if
            there is no ``mesh``.
        backend (`str`, *optional*): The backend of local attention in the transformers, also on one rank: one of
            PyTorch's, ``"triton"`` (docs/kernels.md), or a library that is installed: ``"flash3"``, ``"flash4"``.
            ``"triton-int8"`` and ``"sage"`` are **not exact**; an :class:`AttentionSchedule` confines them to the
            steps in the middle. Defaults to the choice of SDPA, or on several ranks to what the transformer's own
            ``set_attention_backend`` names (docs/pipelines.md).
        cross_backend (`str`, *optional*): The backend of attention to another sequence, such as the text of Wan.
            Defaults to the choice of SDPA, or to ``backend`` if that sequence is sharded.
        comm_dtype (`torch.int8` or `torch.float8_e4m3fn`, *optional*): Rounds what attention sends to 8 bits. **Not
            exact.** Defaults to sending unrounded values.
        attn_func (`Callable`, *optional*): Computes local attention in place of SDPA, as in
            :class:`~para_core.UnifiedAttnMode`, for example ``flash_attention_3()``.
        verify (`bool`, defaults to `False`): Whether to compare the transformers with the unmodified ones, which run on
            the whole inputs: at the first call with each size, and again after code inside them has changed. It costs
            one more call of the transformer, and its memory. If they differ by more than rounding, every rank raises
            and names the first module that differs; if not, the error is logged at level INFO.

    Returns:
        ``pipe`` itself.

    Raises:
        ImportError: If ``backend`` names a library that is not installed.
        TypeError: If the pipeline has no supported transformer or UNet, or an option has a wrong type.
        ValueError: If the mesh or an option does not fit the pipeline, or two options exclude each other.
        RuntimeError: If neither ``mesh`` nor a process group is given on several ranks, if two NCCL ranks use the same
            GPU, if weights are sharded or freed and other weight settings are asked for, or if changing weights fails.

    Example:
        >>> mesh = init_context_parallel_mesh("cuda", max_ring_dim_size=2)  # doctest: +SKIP
        >>> parallelize_pipe(pipe, mesh=mesh, vae=True)  # doctest: +SKIP
    """
    options = ParallelOptions(
        text=text,
        timeout=timeout,
        adapter=adapter,
        assume_equal=assume_equal,
        vae=vae,
        weights=weights,
        text_encoders=text_encoders,
        vae_placement=vae_placement,
        offload=offload,
        resident_blocks=resident_blocks,
        pipefusion=pipefusion,
        rotate_method=rotate_method,
        backend=backend,
        cross_backend=cross_backend,
        comm_dtype=comm_dtype,
        attn_func=attn_func,
        verify=verify,
    )
    call = parallel_call(pipe)
    previous = None if call is None else call.session
    with equal_options("parallelize_pipe", mesh, vars(options)):
        require_kind("pipeline", pipe, "parallelize_transformer, parallelize_unet and parallelize_vae take a model.")
        check_usable(pipe)
        options.check()
        if mesh is None:
            # The default mesh is chosen for the model, so check first that the model is supported.
            check_parallelize(models_to_parallelize(pipe, options.adapter))
    replace_session(pipe, previous, resolve(pipe, mesh, options))
    return pipe


def unparallelize_pipe(pipe: Pipeline) -> Pipeline:
    """Undo :func:`parallelize_pipe` and return ``pipe`` as it was before. Also restores time-outs of process groups.

    If a step of it fails, call it again. Until then ``pipe`` stays parallel, or its calls raise an error.

    Raises:
        RuntimeError: If weights of the pipeline are sharded, or other ranks hold some of its blocks (a mesh with
            ``pipe``): nothing gathers them. Load the pipeline again. The pipeline stays parallel.
    """
    require_kind("pipeline", pipe, "unparallelize_transformer, unparallelize_unet and unparallelize_vae take a model.")
    check_can_be_undone(pipe)
    call = parallel_call(pipe)
    if call is not None:
        try:
            call.session.stop()
        except BaseException:
            # Restore the wrapper of ``__call__``: a second call of this function finds the session through it.
            call.wrap(pipe)
            raise
    # Models that were parallelized without a session, on one rank or as single components, are undone here.
    remove_parallel_call(pipe)
    for module in transformers_of(pipe).values():
        remove_from_transformer(module)
    for module in unets_of(pipe).values():
        unparallelize_unet(module)
    return pipe
