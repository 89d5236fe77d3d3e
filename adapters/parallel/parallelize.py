"""Public functions that run a diffusers pipeline on several ranks.

Here is only the order of the steps: compare options, :func:`resolve` them to a session, replace the earlier
session. A single transformer or UNet is in ``transformer.py`` and ``unet.py``. Tests:
tests/adapters/parallel/test_undo.py, tests/adapters/test_pipelines.py.
"""

from __future__ import annotations

from typing import Any, TypeVar

from para_core.adapters.agree.options import agree_on_options
from para_core.adapters.compatibility.checks import check_parallelize, models_to_parallelize
from para_core.adapters.denoisers import denoiser_run_of, other_denoisers_of
from para_core.adapters.parallel.call import parallel_call, remove_parallel_call
from para_core.adapters.parallel.options import ParallelOptions
from para_core.adapters.parallel.resolve import resolve
from para_core.adapters.parallel.session import replace_session
from para_core.adapters.parallel.transformer import remove_from_transformer
from para_core.adapters.registry import check_pipeline_or_model, transformers_of
from para_core.adapters.weights.one_way import check_can_be_undone, check_usable
from para_core.declared_options import takes_options

Pipeline = TypeVar("Pipeline")


@takes_options(ParallelOptions)
def parallelize_pipe(pipe: Any, options: ParallelOptions) -> Any:
    """Run a diffusers pipeline on all ranks of a mesh. The result equals that of one device up to
    floating-point order.

    Every rank of the mesh calls this function, and afterwards calls the pipeline with the same arguments;
    each gets the full result. Calling it again replaces the previous settings. :func:`unparallelize_pipe`
    restores the pipeline. If anything is invalid or fails on any rank, every rank raises, and the pipeline
    keeps its previous settings. Other pipelines are not changed.

    **Weights are one way.** Weights that were sharded (``weights``, ``text_encoders="fsdp"``) or freed
    (stages, along ``pipe``) are not gathered again. Another call may still replace all other options: leave
    ``weights`` and ``text_encoders`` out or pass them as before, with the same ranks along ``pipe``. Other
    values, and :func:`unparallelize_pipe`, raise: load the pipeline again. Weights change last, after
    everything is checked and applied on all ranks. If that fails on a rank, every rank raises, and the
    pipeline raises whenever it is used.

    Args:
        pipe (`DiffusionPipeline`): A pipeline with a supported transformer or UNet.
        {options}

    Returns:
        ``pipe`` itself.

    Raises:
        ImportError: If ``backend``, ``cross_backend`` or ``products`` needs a library that is not installed.
        TypeError: If the pipeline has no supported transformer or UNet, or an option has a wrong type.
        ValueError: If the mesh or an option does not fit the pipeline, or two options exclude each other.
        RuntimeError: If neither ``mesh`` nor a process group is given on several ranks, if two NCCL ranks use
            the same GPU, if weights are sharded or freed and other weight settings are asked for, or if
            changing weights fails.

    Example:
        >>> mesh = init_context_parallel_mesh("cuda", max_ring_dim_size=2)  # doctest: +SKIP
        >>> parallelize_pipe(pipe, mesh=mesh, vae=True)  # doctest: +SKIP
    """
    with agree_on_options("parallelize_pipe", options.mesh, options.compared):
        check_pipeline_or_model(
            "pipeline", pipe, "parallelize_transformer, parallelize_unet and parallelize_vae take a model."
        )
        check_usable(pipe)
        options.check()
        if options.mesh is None:
            # The default mesh is chosen for the model, so check first that the model is supported.
            check_parallelize(models_to_parallelize(pipe, options.adapter))
    # Outside of the block above, because resolve and replace_session exchange their errors themselves.
    call = parallel_call(pipe)
    previous = None
    if call is not None:
        previous = call.session
    replace_session(pipe, previous, resolve(pipe, options))
    return pipe


def unparallelize_pipe(pipe: Pipeline) -> Pipeline:
    """Undo :func:`parallelize_pipe` and return ``pipe`` as it was before. Also restores time-outs of process
    groups.

    Every rank calls it before its next call of ``pipe``; nothing is exchanged. If a step of it fails, call it
    again. Until then ``pipe`` stays parallel, or its calls raise an error. Transformers and UNets of ``pipe``
    that were parallelized alone are undone, too; an autoencoder that :func:`parallelize_vae` runs stays so.

    Args:
        pipe (`DiffusionPipeline`): The pipeline. Nothing happens if it is not parallel.

    Raises:
        TypeError: If ``pipe`` is no pipeline.
        RuntimeError: If weights of the pipeline are sharded, or other ranks hold some of its blocks (a mesh
            with ``pipe``): nothing gathers them. Load the pipeline again. The pipeline stays parallel.
    """
    check_pipeline_or_model(
        "pipeline", pipe, "unparallelize_transformer, unparallelize_unet and unparallelize_vae take a model."
    )
    check_can_be_undone(pipe)
    call = parallel_call(pipe)
    if call is not None:
        try:
            call.session.stop()
        except BaseException:
            # Fill the slot of the pipeline again: a second call of this function finds the session through it.
            call.wrap(pipe)
            raise
    # Without a session, models were parallelized on one rank or alone.
    remove_parallel_call(pipe)
    for name in transformers_of(pipe):
        remove_from_transformer(getattr(pipe, name))
    for module in other_denoisers_of(pipe).values():
        run = denoiser_run_of(module)
        if run is not None:
            run.remove()
    return pipe
