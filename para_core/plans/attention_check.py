"""Check that each attention module of a planned model makes attention calls that can be intercepted.

Attention modules are those that a plan names, and those with a ``processor``, as in diffusers. If one
computes attention in another way, each rank attends to its own tokens only, and the result is wrong without
an error.

:mod:`.region` owns the check and says when a call begins and ends. Attention computed by hand, without a
processor, is found by :mod:`para_core.modes.handwritten`. Tests: tests/plans/test_attention_check.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from para_core.instance.modules import submodules_of
from para_core.instance.private_class import original_class
from para_core.instance.record import Wrapper, empty_slots, fill_slots
from para_core.instance.slots import Slot
from para_core.modes.handwritten import HandwrittenAttention
from para_core.modes.interceptor import check_replaced_attention
from para_core.plans.foreign_code import find_foreign_code, processor_of
from para_core.plans.interception import Interception
from para_core.plans.planned_attention import PlannedAttention
from para_core.torch_internals import FORWARD_HOOKS, FORWARD_PRE_HOOKS
from para_core.user_warnings import ForeignCodeWarning, ParallelWarning, WarningLog

# Hooks of diffusers that replace attention by values on purpose, for guidance by a perturbed model: its
# output is made of a rank's own tokens. The hooks of a module are in this attribute.
_HOOKS_OF_DIFFUSERS = "_diffusers_hook"
_PERTURBING_HOOKS = ("AttentionProcessorSkipHook", "TransformerBlockSkipHook")


def attention_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules inside ``module`` that have an attention processor, by name."""
    parts = {}
    for name, part in module.named_modules():
        # The condition is that of processor_of, without a Python call for each module.
        if name and (
            part.__dict__.get("processor") is not None or part._modules.get("processor") is not None
        ):
            parts[name] = part
    return parts


def _is_perturbed(module: nn.Module) -> bool:
    """Whether a hook of diffusers replaces the attention of ``module`` on purpose."""
    registry = module.__dict__.get(_HOOKS_OF_DIFFUSERS)
    if registry is None:
        return False
    return any(type(hook).__name__ in _PERTURBING_HOOKS for hook in registry.hooks.values())


class ModelCode:
    """A snapshot of code that users exchange inside a model: processors, hooks and replaced ``forward``
    functions.

    A model has over a thousand modules, so the comparison is made of loops in C, without a Python call per
    module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules = submodules_of(module)
        self._parts = self._now()

    def _now(self) -> list[Any]:
        """Return the processors, replaced ``forward`` functions and hooks of all modules, in one order."""
        states = [module.__dict__ for module in self.modules]
        hooks = [map(dict.get, states, repeat(name)) for name in (FORWARD_PRE_HOOKS, FORWARD_HOOKS)]
        return [
            *map(dict.get, states, repeat("processor")),
            *map(dict.get, states, repeat("forward")),
            *chain.from_iterable([of_module.values() for of_module in chain(*hooks) if of_module]),
        ]

    def is_unchanged(self) -> bool:
        """Whether processors, hooks and replaced ``forward`` functions are the same objects as in the snapshot."""
        now = self._now()
        # Compare identities, because some processors define equality by their settings.
        return len(now) == len(self._parts) and all(
            before is after for before, after in zip(self._parts, now, strict=True)
        )


class AttentionCheck:
    """The check of one planned model: due at its first eager call, and again after code inside it has
    changed, and at the first call whose arguments are of other kinds.

    While it is due, attention modules that the plan does not name have a filled slot, and the hooks of those
    that it names (:mod:`.submodule_calls`) call :meth:`run`. A call that passes empties the slots, so later
    calls cost nothing more. A graph that was traced with them keeps them.

    The evidence of a call is ``intercepted[0]`` of its :class:`PlannedAttention`:

    =====================================================================  ==============
    event                                                                  becomes
    =====================================================================  ==============
    the call of the model begins                                           False
    :meth:`run` is about to call an attention module                       False
    an attention call is intercepted                                       True
    a cache or the like skips attention (``allow_skipped_attention``)      True
    :meth:`run` permits a module without attention (a hook of diffusers)   True
    =====================================================================  ==============

    If it is False after an attention module, :meth:`run` raises, except for the last two rows. So it is False
    in :meth:`conclude` only if no attention module has run, and nothing else has called SDPA.

    Args:
        ranks: Number of ranks that share a sequence. Nothing is checked on one.
        written_for: The class whose code the plan describes; None if somebody wrote the plan for the model at
            hand, with all that is inside it.
        interceptions: That of the model's current call; empty outside of one. It is the list of the region,
            which fills and empties it.
    """

    def __init__(self, ranks: int, written_for: type | None, interceptions: Sequence[Interception]) -> None:
        self.written_for = written_for
        # How often the model's code has changed. verify=True compares a call again after each change.
        self.version = 0
        self.warnings = WarningLog()
        self._ranks = ranks
        self._interceptions = interceptions
        # Whether the next eager call is checked. A graph must not read it, or it would be a guard.
        self.due = ranks > 1
        self._code: ModelCode | None = None
        # The attention modules that the plan describes, whose hooks check them, and those with a filled slot,
        # by name.
        self._planned: Mapping[str, nn.Module] = {}
        self._wrapped: dict[str, nn.Module] = {}
        # Whether a graph holds the functions in the slots. In a list, because Dynamo 2.13 loses an attribute
        # that is set before torch.cond (which a cache adds) and again after it.
        self._is_traced = [False]

    def note_changes(self) -> int:
        """Return how often the code inside the model has changed: processors, hooks, ``forward``. A change
        since the last call makes the check due.

        Replaced submodules are not noticed here: :meth:`~para_core.plans.region.Region.attach` finds them,
        and calls :meth:`reset`.
        """
        if self._code is not None and not self._code.is_unchanged():
            self.reset()
        return self.version

    def reset(self) -> None:
        """Make the check due, because code inside the model has changed."""
        self._code = None
        self.due = self._ranks > 1
        self.version += 1

    def require(self) -> None:
        """Make the check due, because an argument may have switched other code on."""
        if not self.due:
            self._code = None
            self.due = self._ranks > 1

    def begin(self, module: nn.Module, planned: Mapping[str, nn.Module]) -> None:
        """Prepare the check of the next call, if code has changed, and warn of code that the plan does not
        cover.

        Args:
            module: The model.
            planned: The modules whose attention the plan describes, by name.

        Raises:
            RuntimeError: ``F.scaled_dot_product_attention`` was replaced, so calls of it may go unseen.
        """
        if self._ranks == 1:
            return
        check_replaced_attention(self._ranks)
        self.note_changes()
        if self._code is not None:
            return
        code_of_user: list[str] = []
        if self.written_for is not None:
            code_of_user = find_foreign_code(module, self.written_for)
        for code in code_of_user:
            self.warnings.warn(
                code,
                f"{code} sees only this rank's tokens; compare with verify=True. What counts or indexes tokens, or "
                "looks at all of them, is wrong there. If it treats each token alone, silence this: "
                "warnings.filterwarnings('ignore', category=para_core.ForeignCodeWarning).",
                ForeignCodeWarning,
            )
        self._planned = planned
        described = [*planned.values()]
        wrapped = {name: part for name, part in attention_modules(module).items() if part not in described}
        # Modules that are no longer in the model, or that the plan describes now. Not those that stay,
        # because a graph may hold the functions in their slots.
        empty_slots(set(self._wrapped.values()) - set(wrapped.values()), Slot.ATTENTION_CHECK)
        self._wrapped = wrapped
        fill_slots(self._wrapped.values(), Slot.ATTENTION_CHECK, {"__call__": self._run})
        self._code = ModelCode(module)

    def end(self) -> None:
        """Empty the slots of attention modules."""
        empty_slots(self._wrapped.values(), Slot.ATTENTION_CHECK)
        self._wrapped = {}

    def release(self) -> None:
        """Empty the slots, and forget the modules of the model."""
        self.end()
        self.reset()
        self._planned = {}

    def _run(self, call: Wrapper, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run an attention module that the plan does not name, and check it: the function in its slot."""
        if torch.compiler.is_compiling():
            self._is_traced[0] = True
        if not self._interceptions:
            return call(module, *args, **kwargs)
        return self.run(self._interceptions[-1].current, call, module, args, kwargs)

    def run(
        self,
        attention: PlannedAttention,
        call: Wrapper,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run an attention module whose calls ``attention`` computes. Raise ``RuntimeError`` if the module
        had to make a call that could be intercepted, and made none. All ranks run the same code, so all
        raise.
        """
        if not attention.needs_other_ranks():
            return call(module, *args, **kwargs)
        attention.intercepted[0] = False
        output = call(module, *args, **kwargs)
        # skipped is set by allow_skipped_attention (current_call.py).
        if attention.intercepted[0] or attention.skipped[0]:
            return output
        # In a graph, any hook of diffusers counts as one that perturbs, because Dynamo cannot trace
        # _is_perturbed. So a compiled module that has another hook and calls no SDPA passes unchecked.
        if torch.compiler.is_compiling() and getattr(module, _HOOKS_OF_DIFFUSERS, None) is None:
            # Dynamo shows the message in an exception of its own.
            raise RuntimeError(
                f"{type(module).__name__} with the processor {type(getattr(module, 'processor', None)).__name__} was "
                f"compiled to run on {self._ranks} ranks and calls no scaled_dot_product_attention, so each rank would "
                "attend to its own tokens only. Let it call F.scaled_dot_product_attention; an uncompiled call says "
                "which module it is."
            )
        if not torch.compiler.is_compiling() and not _is_perturbed(module):
            raise self._bypass_error(module)
        attention.intercepted[0] = True
        return output

    def _bypass_error(self, module: nn.Module) -> RuntimeError:
        """Return the error for an attention module that ran and made no attention call that was intercepted."""
        parts = {**self._planned, **self._wrapped}
        name = next((name for name, part in parts.items() if part is module), "an attention module")
        processor = processor_of(module)
        code = original_class(module).__name__
        if processor is not None:
            code = f"{code} with the processor {type(processor).__name__}"
        return RuntimeError(
            f"{name} ({code}) ran on {self._ranks} ranks and called no scaled_dot_product_attention, so each rank "
            "attended to its own tokens only. Let it call F.scaled_dot_product_attention, and compute local attention "
            "in your own way by attn_func= or backend= ('sage' for SageAttention); in diffusers "
            "set_attn_processor(AttnProcessor2_0()) or set_attention_backend('native') sets a processor that does."
        )

    def conclude(
        self,
        module: nn.Module,
        attention: PlannedAttention,
        by_hand: HandwrittenAttention | None,
        *,
        has_graphs: bool,
    ) -> None:
        """Raise ``RuntimeError`` if no attention of a finished call of ``module`` was intercepted.

        Args:
            module: The model, whose tokens were sharded.
            attention: Its attention function.
            by_hand: What was seen of attention by hand; None if the call was not checked.
            has_graphs: Whether parts of the model are compiled, whose graphs hold the functions in the slots.
        """
        places = ""
        if by_hand is not None and by_hand.places:
            places = by_hand.describe(module)
        if not attention.intercepted[0]:
            raise self._error_without_attention(module, places)
        if places:
            self._warn_of_handwritten(module, places)
        if by_hand is not None:
            self.due = False
            # The slots stay filled if a graph holds the functions in them.
            if not (has_graphs or self._is_traced[0]):
                self.end()

    def _warn_of_handwritten(self, module: nn.Module, places: str) -> None:
        """Warn that ``module`` called SDPA, and also normalized scores by hand in ``places``."""
        self.warnings.warn(
            places,
            f"{type(module).__name__} on {self._ranks} ranks normalized scores over this rank's tokens by hand, in "
            f"{places}: that is attention to this rank's tokens only. Let it call F.scaled_dot_product_attention, and "
            "compare with one device: verify=True.",
            ParallelWarning,
        )

    def _error_without_attention(self, module: nn.Module, places: str) -> RuntimeError:
        """Return the error for a call of ``module`` in which no attention was intercepted.

        ``places`` is where it normalized scores by hand; empty if it did not, or the call was not checked.
        """
        name = type(module).__name__
        if places:
            return RuntimeError(
                f"{name} ran on {self._ranks} ranks, called no scaled_dot_product_attention, and normalized scores by "
                f"hand, in {places}: each rank attended to its own tokens only. Let the model call "
                "F.scaled_dot_product_attention, and compute local attention in your own way by attn_func=."
            )
        if attention_modules(module):
            # A module that runs and goes past SDPA has raised, so none has run.
            return RuntimeError(
                f"{name} ran on {self._ranks} ranks and none of its attention modules did: the blocks were skipped, as "
                "by a step cache in the model's forward (TeaCache). Ranks would decide apart about the next step, and "
                "wait for each other. apply_cache_on_pipe(pipe, ...) decides for all ranks; "
                "remove the other cache."
            )
        return RuntimeError(
            f"{name} ran on {self._ranks} ranks and called no scaled_dot_product_attention, so each rank attended to "
            "its own tokens only. Let its attention call F.scaled_dot_product_attention; for a kernel of your own "
            "there is attn_func=, and for SageAttention backend='sage'."
        )
