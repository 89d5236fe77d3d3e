"""The options of parallelize_pipe and parallelize_transformer that a recipe and a command do not have
(``adapter``, ``text``), or have with other values (``mesh``, ``weights``), and their checks.

Those with the same values everywhere are declared in ``para_core/pipeline_options.py``. The decorator
``takes_options`` makes these classes from the keyword arguments of the functions, and ``resolve.py`` and
``transformer.py`` read them. What depends on the pipeline or the mesh is checked there, not here. The number
in an :class:`Option` sorts it among those of all classes, in signatures and tables. Tests:
tests/test_declared_options.py, tests/adapters/test_refused_options.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal

import torch

from para_core.adapters.adapter import Adapter, Text
from para_core.adapters.default_mesh import Mesh
from para_core.adapters.weights.feature import WeightsMethod
from para_core.attention.attention_options import AttnOptions
from para_core.attention.backends.added import check_library
from para_core.attention.schedule import AttentionSchedule
from para_core.call_checks import check_comparable
from para_core.declared_options import Option, check_options, declarations, values_of
from para_core.distributed.mesh import GuidedMesh
from para_core.distributed.timeouts import as_timedelta
from para_core.option_values import METHOD_WITH_BITS, RotateMethod
from para_core.pipeline_options import AttentionChoices, PipelineChoices
from para_core.weights.pipefusion_options import PipeFusion


@dataclass(frozen=True, kw_only=True)
class TransformerOptions(AttentionChoices):
    """The options of :func:`~para_core.adapters.parallelize_transformer`."""

    mesh: Annotated[
        Mesh | GuidedMesh | None,
        Option(
            10,
            "Ranks to use, with a `ring` or `ulysses` dim, or both; it may be a slice of a larger mesh. "
            "Ranks along `batch` compute different branches of guidance. Ranks along `pipe` hold "
            "consecutive transformer blocks and free the others (docs/stages.md), so move the pipeline to "
            "its device before. With a UNet, the ranks of the other dims shard the rows of its images. "
            "Defaults to all ranks, in the mesh that `plan_mesh` predicts to be fastest at the pipeline's "
            "default sizes. If there is no prediction (unknown device or model, several hosts), two "
            "branches of guidance get half of the ranks each; the ranks of a branch go to Ulysses, up to "
            "the number of heads, then to the ring. Defaults to one rank if `WORLD_SIZE` is unset or 1. "
            "The choice is logged at level INFO.",
            form="`DeviceMesh` or `ProcessGroup`",
            default="predicted to be fastest by [`plan_mesh`](planner.md)",
            page="pipelines.md#which-mesh",
            # Checked with the ranks that it names.
            is_checked=False,
            needs_transformer=False,
        ),
    ] = None
    text: Annotated[
        Text | None,
        Option(
            20,
            "Whether text tokens are sharded like image tokens or kept on every rank. Both are exact. "
            "Defaults to the faster one for the model.",
            default="the faster one for the model",
            none="for the faster one",
        ),
    ] = None
    adapter: Annotated[
        Adapter | None,
        Option(
            30,
            "Facts about a transformer that is not supported. For a supported class it replaces the "
            "adapter of para_core.",
            default="that of the class",
            page="new_model.md",
            # Checked with the model that it describes.
            is_checked=False,
        ),
    ] = None
    assume_equal: Annotated[
        bool,
        Option(
            40,
            "Whether to skip the comparison of arguments over the ranks, made once per call. Arguments "
            "that differ then give wrong results or a hang. Random numbers are those of the first rank in "
            "both cases.",
            needs_transformer=False,
        ),
    ] = False
    comm_dtype: Annotated[
        torch.dtype | None,
        Option(
            230,
            "Rounds what attention sends to 8 bits. **Not exact.** Defaults to sending unrounded values.",
            form="`torch.int8` or `torch.float8_e4m3fn`",
            default="off",
            page="own_model.md#half-the-bytes",
            # Checked together with the other options of attention.
            is_checked=False,
        ),
    ] = None
    attn_func: Annotated[
        Callable[..., Any] | None,
        Option(
            240,
            "Computes local attention in place of SDPA, as in `UnifiedAttnMode`, for example `flash_attention_3()`.",
            form="`Callable`",
            default="off",
            page="own_model.md#attention-of-your-own-on-each-device",
            expected="a function that computes attention",
        ),
    ] = None

    def check(self) -> None:
        """Validate the options.

        Raises:
            ImportError: If ``backend``, or a backend of its schedule, or ``cross_backend`` names a library
                that is not installed.
            TypeError: If an option has a wrong type.
            ValueError: If an option has an unknown value, or two options exclude each other.
        """
        check_options(self)
        self.attention(None)
        if self.backend is not None and self.attn_func is not None:
            raise ValueError(
                f"backend={self.backend!r} and attn_func both choose the local attention. Leave one out."
            )
        if self.cross_backend is not None and self.attn_func is not None:
            raise ValueError(
                f"cross_backend={self.cross_backend!r} and attn_func both choose the attention to another sequence. "
                "Leave one out."
            )
        for backend in self.backends:
            check_library(backend)
        check_comparable(vars(self), self.approximations)

    @property
    def compared(self) -> dict[str, object]:
        """The options that ranks compare by value. The mesh is compared by its sizes."""
        return {name: value for name, value in vars(self).items() if name != "mesh"}

    @property
    def approximations(self) -> list[str]:
        """The names of the options with which a transformer call differs from that of one device by more than
        rounding, so that ``verify=True`` is refused with them (:func:`check_comparable`).
        """
        names = self.approximate_backends
        if self.comm_dtype is not None:
            names.insert(0, "comm_dtype")
        return names

    def attention(self, default_method: RotateMethod | None) -> AttnOptions:
        """Return the attention options. If ``backend`` is a schedule, they contain the exact backend of the
        schedule.

        ``default_method`` is the ``rotate_method`` of the predicted mesh, used if the user gave neither that
        option nor ``comm_dtype``; None stands for ``"alltoall"``. ``same_bits`` overrides both with the one
        that has the bits of one process.
        """
        method = self.rotate_method
        if method is None and self.comm_dtype is None:
            method = default_method
        # same_bits refuses comm_dtype with a message of its own. METHOD_WITH_BITS cannot send 8 bits, so it
        # would be refused here first.
        if self.same_bits and self.comm_dtype is None:
            method = METHOD_WITH_BITS
        backend = self.backend
        if isinstance(backend, AttentionSchedule):
            backend = backend.exact
        # Name the option only if it is set: a copy of para_core without 8-bit exchange does not know it.
        others: dict[str, Any] = {}
        if self.comm_dtype is not None:
            others["comm_dtype"] = self.comm_dtype
        return AttnOptions.of(rotate_method=method or "alltoall", backend=backend, **others)


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(TransformerOptions, PipelineChoices):
    """The options of :func:`~para_core.adapters.parallelize_pipe`."""

    timeout: Annotated[
        timedelta | float | None,
        Option(
            260,
            "How long the ranks of the mesh wait for a rank that does not answer; set on the process "
            "groups of the mesh. Afterwards gloo raises, and NCCL ends the process. If several pipelines "
            "set it on the same groups, the latest one that has not been undone is in effect. Defaults to "
            "leaving the time-outs of the groups unchanged.",
            form="`timedelta` or `float` in seconds",
            default="that of the groups",
            page="several_nodes.md#time-outs",
            # Checked by as_timedelta.
            is_checked=False,
            needs_transformer=False,
        ),
    ] = None
    weights: Annotated[
        WeightsMethod | Literal["replicate"] | None,
        Option(
            120,
            "How weights are distributed: sharded as by `shard_weights(pipe, mesh, method=weights)`, or all of them on "
            "every rank. Defaults to leaving them as they are, sharded or not.",
            default="unchanged",
            needs_transformer=False,  # except for "tensor", see transformer_options
            page="weights.md",
            none="to leave them as they are",
        ),
    ] = None
    offload: Annotated[
        Literal["blocks"] | None,
        Option(
            140,
            "Keeps the blocks of the transformers in host memory, also on one rank; each is copied to the "
            "device before it runs, and on CUDA while the block before it runs. Exact (docs/weights.md). "
            "Defaults to leaving them on the device.",
            default="off",
            page="weights.md#blocks-in-host-memory",
            none="to leave them as they are",
        ),
    ] = None
    pipefusion: Annotated[
        PipeFusion | None,
        Option(
            250,
            "Lets the stages of a mesh with `pipe` work at the same time, on patches that attend to keys "
            "of the previous step. **Not exact.** On a mesh without stages a single process can compute "
            "the same result (docs/stages.md). Defaults to exact stages.",
            default="off",
            page="stages.md",
            expected="a PipeFusion of para_core",
        ),
    ] = None

    def check(self) -> None:
        """Validate the options, as :meth:`TransformerOptions.check` does, which says what is raised."""
        super().check()
        self.check_vae()
        if self.resident_blocks is not None and self.offload is None:
            raise ValueError(
                f"resident_blocks is {self.resident_blocks} without offload, so that all blocks stay on the device. "
                "Pass offload='blocks' as well, or leave resident_blocks out."
            )
        if self.timeout is not None:
            as_timedelta(self.timeout)
        if self.schedule is not None and self.pipefusion is not None:
            raise ValueError(
                "backend= is an AttentionSchedule, and with pipefusion= several steps are computed at the same time. "
                "Name one backend for all steps, or leave pipefusion= out."
            )

    @property
    def approximations(self) -> list[str]:
        """As in :class:`TransformerOptions`, and ``pipefusion``."""
        names = super().approximations
        if self.pipefusion is not None:
            names.insert(0, "pipefusion")
        return names

    @property
    def transformer_options(self) -> dict[str, object]:
        """The options that the user gave and that apply to transformers only, by name."""
        names = [each.name for each in declarations(ParallelOptions) if each.option.needs_transformer]
        if self.weights == "tensor":
            names.append("weights")
        values = values_of(self, ParallelOptions)
        return {
            name: values[name] for name in names if values[name] is not None and values[name] is not False
        }
