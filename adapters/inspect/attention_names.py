"""Map the attention backends that diffusers names to backends of para_core, for calls on several ranks, and
describe the attention processors and code that users exchanged, for ranks to compare.

A user chooses a backend of diffusers by ``set_attention_backend``, ``attention_backend(...)`` or the
environment. Most of these do not call scaled_dot_product_attention, the function that para_core intercepts.
During a call on several ranks the attention processors therefore use ``"native"``, which calls that function,
and para_core computes attention with its own equivalent of the chosen backend. Written for diffusers 0.42.1,
``models/attention_dispatch.py``.

``adapters/compatibility/checks.py`` calls the checks before each parallel call, and ``adapters/parallel``
runs the call inside :func:`translated_attention`. Tests: tests/adapters/test_unseen_attention.py,
tests/adapters/test_attention_options.py, tests/adapters/compatibility/test_checks.py,
tests/plans/test_attention_check.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from typing import Any, NamedTuple

from torch import nn

from para_core.adapters.refusal import refusal
from para_core.attention.backends.added import ADDED, check_library
from para_core.instance.modules import submodules_of
from para_core.option_values import Backend
from para_core.plans.module_matching import matching_modules
from para_core.plans.plan import AttentionByHeads, AttentionRule
from para_core.plans.region import region_of
from para_core.torch_internals import FORWARD_HOOKS, FORWARD_PRE_HOOKS

# Names of backends that call scaled_dot_product_attention, so para_core can intercept their attention.
_SEEN = ("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")
# Names of the backends that do not call scaled_dot_product_attention, each with para_core's equivalent. None
# leaves the choice of a kernel to SDPA: these backends compute exact attention as SDPA does, and a fixed
# kernel would not take masks.
TRANSLATED: Mapping[str, Backend | None] = {
    "flash": "flash",
    "flash_varlen": None,
    "flex": None,
    "xformers": None,
    **{alias: name for name, backend in ADDED.items() for alias in backend.aliases},
}


class ProcessorBackend(NamedTuple):
    """The backend of diffusers that one attention processor uses."""

    path: str
    processor: Any
    name: str
    # Whether the processor computes cross-attention, whose keys come from another sequence.
    crosses: bool

    @property
    def backend(self) -> Backend | None:
        """The equivalent backend of para_core; None leaves the choice to SDPA.

        None for a native backend, too, which is not in the table: SDPA runs it. Names that have no
        equivalent are refused before (:func:`check_attention_is_seen`).
        """
        return TRANSLATED.get(self.name)


def check_attention_is_seen(settings: Sequence[ProcessorBackend], name: str, sequence_ranks: int) -> None:
    """Refuse an attention backend of diffusers that has no equivalent in para_core."""
    for setting in settings:
        if setting.name not in (*_SEEN, *TRANSLATED):
            raise RuntimeError(
                f"{name} attends with diffusers' backend {setting.name!r} in {setting.path!r}, which does not call "
                f"scaled_dot_product_attention: each of {sequence_ranks} ranks would attend to its own tokens only. "
                f"Switch to a native backend: {name}.set_attention_backend('native'). Names of installed packages "
                "('flash', '_flash_3', 'sage') work, and those of kernels from the Hub and of other devices do not."
            )
        check_library(setting.backend)


def check_one_attention_backend(settings: Sequence[ProcessorBackend], name: str) -> None:
    """Refuse several attention backends of diffusers in one transformer."""
    for kind in _by_kind(settings):
        other = next((setting for setting in kind if setting.name not in _SEEN), None)
        odd = next(
            (setting for setting in kind if other is not None and setting.backend != other.backend), None
        )
        if other is not None and odd is not None:
            raise refusal(
                RuntimeError,
                f"{name} attends with diffusers' backend {other.name!r} in {other.path!r} and {odd.name!r} in "
                f"{odd.path!r}. On several ranks all attention of a kind, to the own sequence or to another, has one "
                "backend.",
                f"Set it for all: {name}.set_attention_backend({other.name!r}).",
            )


def check_attention_named_once(settings: Sequence[ProcessorBackend], module: nn.Module, name: str) -> None:
    """Refuse an attention backend of diffusers that contradicts the backend= or cross_backend= of para_core."""
    region = region_of(module)
    for kind in _by_kind(settings):
        other = next((setting for setting in kind if setting.name not in _SEEN), None)
        if region is None or other is None:
            continue
        option, backend = "backend", region.options.backend
        if other.crosses:
            option, backend = "cross_backend", region.cross_backend
        if backend not in (None, other.backend):
            raise RuntimeError(
                f"{name} attends with diffusers' backend {other.name!r} in {other.path!r}, and it was parallelized "
                f"with {option}={backend!r}. Leave one out: "
                f"{name}.set_attention_backend('native') leaves the choice to the option."
            )


def check_native_attention(module: nn.Module, name: str) -> None:
    """Raise ``ValueError`` if diffusers names a backend for ``module``, which follows an attention schedule."""
    other = next((setting for setting in processor_backends(module) if setting.name not in _SEEN), None)
    if other is not None:
        raise ValueError(
            f"{name} attends with diffusers' backend {other.name!r} in {other.path!r}, and backend= is an "
            f"AttentionSchedule. Leave one out: {name}.set_attention_backend('native')."
        )


def _by_kind(settings: Sequence[ProcessorBackend]) -> list[list[ProcessorBackend]]:
    """Return two lists: the settings of the self-attention and of the cross-attention processors."""
    return [[setting for setting in settings if setting.crosses == crosses] for crosses in (False, True)]


def describe_attention(module: nn.Module) -> dict[str, str]:
    """Return the attention options of ``module`` by name, to compare them between ranks; empty if not parallel."""
    region = region_of(module)
    if region is None:
        return {}
    options = {**region.options.by_name, "cross_backend": str(region.cross_backend)}
    if region.mesh.ranks > 1:
        names = sorted({backend.name for backend in processor_backends(module)})
        options["diffusers' attention backend"] = ", ".join(names) or "native"
        options |= describe_code(module)
    return options


def describe_code(module: nn.Module) -> dict[str, str]:
    """Return what users exchange inside ``module``, to compare it between ranks: attention processors, hooks
    and replaced ``forward`` functions, by number.
    """
    kinds = Counter([type(processor).__qualname__ for processor in processors_of(module)])
    states = [part.__dict__ for part in submodules_of(module)]
    hooks = sum([len(state[FORWARD_PRE_HOOKS]) + len(state[FORWARD_HOOKS]) for state in states])
    forwards = sum(map(dict.__contains__, states, repeat("forward")))
    return {
        "attention processors": ", ".join([f"{number} × {kind}" for kind, number in sorted(kinds.items())]),
        "hooks and replaced forward functions": f"{hooks} and {forwards}",
    }


@contextmanager
def translated_attention(module: nn.Module) -> Iterator[None]:
    """Use para_core's equivalents of the backends that diffusers names for ``module``, inside the ``with``
    block.

    The checks :func:`check_attention_is_seen` and :func:`check_one_attention_backend` must have passed. Does
    nothing on one rank, where diffusers' own backends run.
    """
    region = region_of(module)
    others: list[ProcessorBackend] = []
    if region is not None and region.mesh.ranks > 1:
        others = [backend for backend in processor_backends(module) if backend.name not in _SEEN]
    if region is None or not others:
        yield
        return
    from diffusers.models.attention_dispatch import AttentionBackendName

    options, cross = region.options, region.cross_backend
    before = [(setting.processor, setting.processor._attention_backend) for setting in others]
    # By whether it computes cross-attention. check_one_attention_backend has found one backend for each kind.
    chosen = {setting.crosses: setting.backend for setting in others}
    try:
        region.use(replace(options, backend=chosen.get(False) or options.backend), chosen.get(True) or cross)
        for setting in others:
            setting.processor._attention_backend = AttentionBackendName.NATIVE
        yield
    finally:
        for processor, backend in before:
            processor._attention_backend = backend
        region.use(options, cross)


def processor_backends(module: nn.Module) -> list[ProcessorBackend]:
    """Return the backend of each processor; empty if all processors call scaled_dot_product_attention."""
    backends = {x._attention_backend for x in processors_of(module) if hasattr(x, "_attention_backend")}
    if set(map(_backend_name, backends)) <= set(_SEEN):
        return []
    return _backends_by_path(module)


def processors_of(module: nn.Module) -> list[Any]:
    """Return the attention processors of ``module`` and of all modules inside it.

    Called several times per call of a model, so it makes no Python call per module.
    """
    # Read the dicts directly: getattr() is slow on the many modules that have no processor.
    processors: list[Any] = [
        x.__dict__.get("processor") or x._modules.get("processor") for x in submodules_of(module)
    ]
    return [processor for processor in processors if processor is not None]


def _backends_by_path(module: nn.Module) -> list[ProcessorBackend]:
    """Return the backend of each processor, without those of modules that attend by heads.

    Which modules do, and which ones compute cross-attention, is read from the plan that is applied to ``module``.
    """
    settings, by_heads, crossing = [], set(), set()
    region = region_of(module)
    attention_by_pattern: Mapping[str, AttentionRule] = {}
    if region is not None:
        attention_by_pattern = region.plan.attention
    for pattern, attention in attention_by_pattern.items():
        if isinstance(attention, AttentionByHeads):
            # The module then attends to all tokens with some of the heads, so any backend of diffusers is
            # correct.
            by_heads |= set(matching_modules(module, pattern))
        elif isinstance(attention, tuple) and all(call.keys is not None for call in attention):
            crossing |= set(matching_modules(module, pattern))
    for path, submodule in module.named_modules():
        processor: Any = getattr(submodule, "processor", None)
        if path not in by_heads and hasattr(processor, "_attention_backend"):
            settings.append(
                ProcessorBackend(
                    path, processor, _backend_name(processor._attention_backend), path in crossing
                )
            )
    return settings


def _backend_name(backend: Any) -> str:
    """Return the name of ``backend``, an attribute of a processor; for None that of diffusers' default."""
    if backend is None:
        # No backend is set on this processor, so diffusers uses its global default, which
        # attention_backend(...), set_attention_backend and the environment can change.
        from diffusers.models.attention_dispatch import _AttentionBackendRegistry

        backend, _ = _AttentionBackendRegistry.get_active_backend()
    return str(getattr(backend, "value", backend))
