"""Run one transformer, UNet or ControlNet on several ranks; also defines the options of parallelize_pipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from para_core.adapters.adapter import Adapter, Text
from para_core.adapters.agree.options import equal_options
from para_core.adapters.compatibility.checks import CheckedModel, check_parallelize, require_same_call_of_model
from para_core.adapters.inspect.attention_names import attention_by_name, translated_attention
from para_core.adapters.parallel.parts import FeaturePart
from para_core.adapters.parallel.session import ParallelSession, Part, Undo, replace_session
from para_core.adapters.planner.default_mesh import Mesh, guided_mesh_for
from para_core.adapters.registry import planned_class, require_kind, require_plan
from para_core.adapters.vae.unet import UnetRun
from para_core.adapters.weights.feature import ChangeRequest, Method
from para_core.adapters.weights.features import changes_for, shard_methods
from para_core.adapters.weights.one_way import check_can_be_undone, check_usable
from para_core.attention.attention_options import AttnOptions
from para_core.attention.libraries import require_library
from para_core.attention.local import AttnFunc
from para_core.attention.schedule import AttentionSchedule
from para_core.cache.apply import cache_options
from para_core.distributed.agree import RequireEqual, raising_on_all
from para_core.distributed.mesh import GuidedMesh
from para_core.distributed.timeouts import as_timedelta
from para_core.instance_patching import (
    WrapperPriority,
    original_class,
    restored_on_failure,
    uncompiled,
    unwrap,
    wrap_method,
)
from para_core.option_values import (
    BACKENDS,
    EXACT_FORM,
    TEXT_ENCODERS,
    VAE_PLACEMENTS,
    Backend,
    RotateMethod,
    TextEncoders,
    VaePlacement,
)
from para_core.plans.module_matching import match_modules
from para_core.plans.plan import Plan
from para_core.plans.region import apply_plan, remove_plan
from para_core.verify.verification import VERIFIED, Verification
from para_core.weights.pipefusion_options import PipeFusion

Transformer = TypeVar("Transformer", bound=nn.Module)
Unet = TypeVar("Unet", bound=nn.Module)


def parallelize_transformer(
    transformer: Transformer,
    *,
    mesh: Mesh | GuidedMesh | None = None,
    text: Text | None = None,
    adapter: Adapter | None = None,
    assume_equal: bool = False,
    rotate_method: RotateMethod | None = None,
    backend: Backend | None = None,
    cross_backend: Backend | None = None,
    comm_dtype: torch.dtype | None = None,
    attn_func: AttnFunc | None = None,
    verify: bool = False,
) -> Transformer:
    """Run one transformer on all ranks of a mesh: each rank passes the same inputs and gets the full output.

    Use it in a denoising loop of your own; :func:`parallelize_pipe` also keeps random numbers and arguments equal on
    all ranks. In eager code, and if the transformer was compiled in place, each call first compares a fingerprint of
    its inputs over the ranks. If anything is invalid or fails on any rank, every rank raises and the transformer stays
    as it was.

    Args:
        transformer (`nn.Module`): A supported diffusers transformer, compiled or not.
        mesh, text, adapter, rotate_method, backend, cross_backend, comm_dtype, attn_func, verify: As in
            :func:`parallelize_pipe`.
        assume_equal (`bool`, defaults to `False`): Whether to skip the comparison of inputs. The comparison costs a
            fingerprint on the device, 8 bytes per tensor copied to the host, and one small exchange.

    Returns:
        ``transformer`` itself.

    Raises:
        TypeError: If the transformer is not supported.
        ValueError: If the mesh or an option does not fit the transformer.
        RuntimeError: As for :func:`parallelize_pipe`.
    """
    options = ParallelOptions(
        text=text,
        adapter=adapter,
        assume_equal=assume_equal,
        rotate_method=rotate_method,
        backend=backend,
        cross_backend=cross_backend,
        comm_dtype=comm_dtype,
        attn_func=attn_func,
        verify=verify,
    )
    module = uncompiled(transformer)
    model = CheckedModel(module, module, adapter=adapter)
    with equal_options("parallelize_transformer", mesh, vars(options)):
        require_kind("model", transformer, "parallelize_pipe takes a pipeline.")
        options.check()
        if options.schedule is not None:
            raise ValueError(
                "backend= is an AttentionSchedule, and a transformer alone does not know the step of a generation. "
                "Pass it to parallelize_pipe, or name one backend."
            )
        if mesh is None:
            # The default mesh is chosen for the model, so check first that the model is supported.
            check_parallelize([model])
    guided = guided_mesh_for(mesh, module)
    with raising_on_all(guided, f"this {type(module).__name__} cannot run on these ranks"):
        check_usable(module)
        check_parallelize([model], guided)
        part = resolve_transformer(module, guided, options, options.attention(None), called=transformer)
        compare = partial(require_equal_call, mesh=guided, assume_equal=assume_equal)
        changes = changes_for(ChangeRequest(module, {"": module}, guided, vars(options), compare))
    replace_session(module, None, ParallelSession(guided, [part, *map(FeaturePart, changes)]))
    return transformer


def unparallelize_transformer(transformer: Transformer) -> Transformer:
    """Undo :func:`parallelize_transformer` and return ``transformer``.

    Raises:
        RuntimeError: If weights of the transformer are sharded, or other ranks hold some of its blocks (a mesh with
            ``pipe``). Load it again.
    """
    require_kind("model", transformer, "unparallelize_pipe takes a pipeline.")
    check_can_be_undone(uncompiled(transformer))
    remove_from_transformer(transformer)
    return transformer


def remove_from_transformer(transformer: nn.Module) -> None:
    """Remove the plan and the verification of ``transformer``, whatever its weights are."""
    for module in (transformer, uncompiled(transformer)):
        unwrap(module, VERIFIED)
    remove_plan(uncompiled(transformer))


def resolve_transformer(
    module: nn.Module,
    mesh: GuidedMesh,
    options: ParallelOptions,
    attention: AttnOptions,
    *,
    batched: bool = True,
    called: nn.Module | None = None,
) -> TransformerPart:
    """Return the session part that runs ``module``, which is not compiled, on ``mesh``. Changes nothing.

    ``batched`` says whether samples may be sharded over the ``batch`` dim of the mesh. ``called`` is ``module`` or the
    compiled module around it, to verify its calls; None if the caller verifies them.
    """
    if options.verify and mesh.pipe.size > 1:
        raise ValueError(
            f"verify=True on a mesh with {mesh.pipe.size} stages: no rank has the blocks of the unmodified model. "
            "Verify on a mesh without 'pipe', then leave verify= out."
        )
    plan = require_plan(module, module, options.adapter, options.text)
    if not batched:
        plan = replace(plan, batched={})
    if mesh.ranks > 1:
        match_modules(module, plan)
    return TransformerPart(module, plan, mesh, options, attention, called if options.verify else None)


@dataclass(frozen=True)
class TransformerPart(Part):
    """The change that applies a plan to one transformer."""

    module: nn.Module
    plan: Plan
    mesh: GuidedMesh
    options: ParallelOptions
    attention: AttnOptions
    verified: nn.Module | None = None
    name = "the transformer"

    def apply(self) -> Undo:
        require_equal = None
        if self.mesh.ranks > 1:
            require_equal = require_equal_call(self.module, mesh=self.mesh, assume_equal=self.options.assume_equal)
        apply_plan(
            self.module,
            self.plan,
            self.mesh.sequence,
            batch=self.mesh.batch,
            require_equal=require_equal,
            options=self.attention,
            attn_func=self.options.attn_func,
            cross_backend=self.options.cross_backend,
            on_one_rank=self.options.schedule is not None,
            around=partial(translated_attention, self.module),
            written_for=planned_class(self.module, self.options.adapter),
        )
        if self.verified is not None:
            wrap_method(self.verified, "__call__", VERIFIED, Verification().run, order=WrapperPriority.VERIFIED)
        return partial(remove_from_transformer, self.module if self.verified is None else self.verified)

    def clear(self) -> Undo:
        return remove_plan(self.module)

    def suspend(self, undo: Undo, mesh: GuidedMesh) -> Undo:
        return self.clear()


def require_equal_call(module: nn.Module, *, mesh: GuidedMesh, assume_equal: bool) -> RequireEqual:
    """Return a function of the arguments of a call of the transformer ``module``, by name.

    It raises on every rank if the arguments or the transformer's settings differ between ranks.
    """

    def require_equal(kwargs: Mapping[str, Any]) -> None:
        options = cache_options(module)
        texts = {} if options is None else options.as_text()
        cached = {f"{option} of its cache": text for option, text in texts.items()}
        inputs = {**kwargs, **cached, **attention_by_name(module)}
        require_same_call_of_model(module, mesh, inputs, assume_equal=assume_equal)

    return require_equal


def parallelize_unet(
    unet: Unet, *, mesh: Mesh | GuidedMesh | None = None, assume_equal: bool = False, batched: bool = True
) -> Unet:
    """Run one UNet or ControlNet on all ranks of a mesh: each rank passes the same inputs and gets the full output.

    Use it in a denoising loop of your own, as :func:`parallelize_transformer`. Ranks along ``ring`` and ``ulysses``
    shard the rows of the image (columns, if it is wider than high), and ranks along ``batch`` shard the samples. No
    gradients are computed. Calling it again replaces the previous settings.

    Args:
        unet (`nn.Module`): A supported UNet or ControlNet of diffusers (docs/vae.md lists them).
        mesh, assume_equal: As in :func:`parallelize_transformer`.
        batched (`bool`, defaults to `True`): Whether samples are sharded over ``batch``. Pass `False` if the model's
            output for a sample depends on its position in the batch.

    Returns:
        ``unet`` itself.

    Raises:
        TypeError: If the class is not supported.
        ValueError: If the mesh does not fit.
    """
    module: nn.Module = uncompiled(unet)
    options = {"assume_equal": assume_equal, "batched": batched}
    with equal_options("parallelize_unet", mesh, options):
        require_kind("model", unet, "parallelize_pipe takes a pipeline.")
        _require_bools(options)
        check_parallelize([CheckedModel(module, module, "unet")])
    guided = guided_mesh_for(mesh, module)
    with (
        restored_on_failure([module]),
        raising_on_all(guided, f"this {original_class(module).__name__} cannot run in rows"),
    ):
        resolve_unet(module, guided, assume_equal=assume_equal, batched=batched).apply()
    return unet


def resolve_unet(module: nn.Module, mesh: GuidedMesh, *, assume_equal: bool, batched: bool) -> UnetRun:
    """Return the handler that will run ``module`` with its image rows sharded over ``mesh``. Changes nothing yet."""
    check_parallelize([CheckedModel(module, module, "unet")], mesh)
    require_equal = partial(require_same_call_of_model, module, mesh, assume_equal=assume_equal)
    return UnetRun(module, mesh, batched=batched, require_equal=require_equal)


def _require_bools(options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; expected True or False.")


# Options that only apply to transformers; of the values of ``weights``, only "tensor".
_OF_TRANSFORMERS = (
    *("text", "adapter", "weights", "offload", "pipefusion"),
    *("rotate_method", "backend", "cross_backend", "comm_dtype", "attn_func", "verify"),
)


@dataclass(frozen=True)
class ParallelOptions:
    """The options of :func:`~para_core.adapters.parallelize_pipe`, whose docstring explains each option."""

    text: Text | None = None
    timeout: timedelta | float | None = None
    adapter: Adapter | None = None
    assume_equal: bool = False
    vae: bool = False
    weights: Method | Literal["replicate"] | None = None
    text_encoders: TextEncoders | None = None
    vae_placement: VaePlacement | None = None
    offload: Literal["blocks"] | None = None
    resident_blocks: int | None = None
    pipefusion: PipeFusion | None = None
    rotate_method: RotateMethod | None = None
    backend: Backend | AttentionSchedule | None = None
    cross_backend: Backend | None = None
    comm_dtype: torch.dtype | None = None
    attn_func: AttnFunc | None = None
    verify: bool = False

    def check(self) -> None:
        """Validate the options.

        Raises:
            ImportError: If ``backend`` names a library that is not installed.
            TypeError: If an option has a wrong type.
            ValueError: If an option has an unknown value, or two options exclude each other.
        """
        _require_bools({"assume_equal": self.assume_equal, "vae": self.vae, "verify": self.verify})
        for name, values in (
            ("weights", (*shard_methods(), "replicate")),
            ("text_encoders", TEXT_ENCODERS),
            ("vae_placement", VAE_PLACEMENTS),
            ("offload", ("blocks",)),
        ):
            value = vars(self)[name]
            if value not in (None, *values):
                expected = ", ".join(map(repr, values))
                raise ValueError(f"{name} is {value!r}; expected {expected}, or None to leave them as they are.")
        if self.vae and self.vae_placement == "first":
            raise ValueError(
                "vae=True runs the VAE on all ranks, and vae_placement='first' on one. Leave one out; "
                "vae_placement='offload' goes with vae=True."
            )
        if self.resident_blocks is not None:
            if isinstance(self.resident_blocks, bool) or not isinstance(self.resident_blocks, int):
                raise TypeError(f"resident_blocks is {self.resident_blocks!r}; expected a number of blocks, or None.")
            if self.resident_blocks < 0:
                raise ValueError(f"resident_blocks is {self.resident_blocks}; expected 0 or more.")
            if self.offload is None:
                raise ValueError(
                    f"resident_blocks is {self.resident_blocks} without offload, so that all blocks stay on the "
                    "device. Pass offload='blocks' as well, or leave resident_blocks out."
                )
        if self.pipefusion is not None and not isinstance(self.pipefusion, PipeFusion):
            raise TypeError(f"pipefusion is {self.pipefusion!r}; expected a PipeFusion of para_core, or None.")
        if self.attn_func is not None and not callable(self.attn_func):
            raise TypeError(f"attn_func is {self.attn_func!r}; expected a function that computes attention, or None.")
        if self.backend is not None and self.attn_func is not None:
            raise ValueError(f"backend={self.backend!r} and attn_func both choose the local attention. Leave one out.")
        if self.timeout is not None:
            as_timedelta(self.timeout)
        self.attention(None)
        if self.cross_backend not in (None, *BACKENDS):
            raise ValueError(
                f"cross_backend is {self.cross_backend!r}; expected one of {', '.join(BACKENDS)}, or None."
            )
        if self.cross_backend is not None and self.attn_func is not None:
            raise ValueError(
                f"cross_backend={self.cross_backend!r} and attn_func both choose the attention to another sequence. "
                "Leave one out."
            )
        own = self.backend.backends if isinstance(self.backend, AttentionSchedule) else (self.backend,)
        for backend in (*own, self.cross_backend):
            require_library(backend)
        if self.schedule is not None and self.pipefusion is not None:
            raise ValueError(
                "backend= is an AttentionSchedule, and with pipefusion= several steps are computed at the same time. "
                "Name one backend for all steps, or leave pipefusion= out."
            )

        if self.verify and self.approximations:
            raise ValueError(
                f"verify=True compares with exact results, and {', '.join(self.approximations)} approximates. Verify "
                "without it, then leave verify= out."
            )

    @property
    def approximations(self) -> list[str]:
        """The options with which a transformer call differs from that of one device by more than rounding."""
        names = [name for name in ("comm_dtype", "pipefusion") if vars(self)[name] is not None]
        names += [name for name in ("backend", "cross_backend") if vars(self)[name] in EXACT_FORM]
        return names + (["backend"] if self.schedule is not None and self.schedule.approximates else [])

    def attention(self, default_method: RotateMethod | None) -> AttnOptions:
        """Return the attention options. If ``backend`` is a schedule, they contain the exact backend of the schedule.

        ``default_method`` is the ``rotate_method``, if the user gave neither that option nor ``comm_dtype``.
        """
        if self.comm_dtype is not None:
            default_method = None
        return AttnOptions(
            rotate_method=(default_method or "alltoall") if self.rotate_method is None else self.rotate_method,
            backend=self.backend.exact if isinstance(self.backend, AttentionSchedule) else self.backend,
            comm_dtype=self.comm_dtype,
        )

    @property
    def schedule(self) -> AttentionSchedule | None:
        """Return ``backend`` if it is an :class:`AttentionSchedule`; None otherwise."""
        return self.backend if isinstance(self.backend, AttentionSchedule) else None

    @property
    def of_transformers(self) -> dict[str, object]:
        """Return the options of ``_OF_TRANSFORMERS`` that the user gave, by name."""
        options = {
            **vars(self),
            "weights": "tensor" if self.weights == "tensor" else None,
            "verify": self.verify or None,
        }
        return {name: options[name] for name in _OF_TRANSFORMERS if options[name] is not None}
