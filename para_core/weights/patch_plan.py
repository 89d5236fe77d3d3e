"""Split a model's tokens into patches by its plan: patch m of M gets what rank m of M ranks would get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from para_core.distributed.layout import Segment, SequenceLayout
from para_core.distributed.mesh import MeshDim, SequenceMesh, dim_of_one
from para_core.instance_patching import WrapperPriority, unwrap, wrap_alike
from para_core.plans.apply_rules import RuleExecutor
from para_core.plans.module_matching import ModuleRules, as_tuple, match_modules, parameters_of
from para_core.plans.plan import Attention, AttentionByHeads, Entries, FirstTokens, LastTokens, Plan, Replicate, Split
from para_core.weights.patch_operator import PatchAttnMode

# (begin, length) along tokens, or along a dim of a model's input.
Rows = tuple[int, int]
# Keys of the wrappers that split inputs and gather outputs, and that split outputs.
_INPUTS, _OUTPUTS = "pipefusion: inputs", "pipefusion: outputs"


@dataclass(frozen=True)
class Frames:
    """The frames of a model that makes tokens from a video. Its tokens are in the order of the frames, equally many per
    frame.

    Args:
        dim (`int`): The dim of the frames in ``hidden_states`` and in the output.
        together (`str`, *optional*): The entry of the config with the number of frames that become one frame of tokens
            (of a tuple, the first number). Defaults to one frame.
    """

    dim: int
    together: str | None = None

    def of_one(self, module: nn.Module) -> int:
        """Return the number of frames that become one frame of tokens."""
        config: Any = module.config
        entry = None if self.together is None else config[self.together]
        return int((entry[0] if isinstance(entry, (tuple, list)) else entry) or 1)


@dataclass(frozen=True)
class PatchPlan:
    """The split of one model into patches.

    Args:
        segment: The segment of ``plan`` that is split. Other sharded segments belong to the first patch, replicated
            ones to each patch.
        dim: The dim of ``hidden_states`` and of the output along which patches follow each other.
        together: Number of entries along ``dim`` that stay in one patch.
        ndim: Number of dims of ``hidden_states``.
    """

    plan: Plan
    segment: str
    dim: int
    together: int
    ndim: int

    @property
    def returns_patch(self) -> bool:
        """Whether the model returns the tokens of a patch, and not a whole output in which only these are valid."""
        return "" in self.plan.outputs

    def rows(self, like: Tensor, num_patches: int) -> list[Rows]:
        """Return begin and length of each patch along ``dim`` of ``like``, the model's input.

        Raises:
            ValueError: ``like`` has other dims than expected, or there are fewer tokens or frames than patches.
        """
        total, rest = divmod(like.shape[self.dim], self.together) if like.ndim == self.ndim else (0, 1)
        if rest:
            raise ValueError(
                f"the model's input is {list(like.shape)}; PipeFusion expects {self.ndim} dims, and in dim {self.dim} "
                f"a multiple of {self.together}."
            )
        what = "tokens" if self.ndim == 3 else "frames of latents"
        return [(self.together * begin, self.together * size) for begin, size in patch_rows(total, num_patches, what)]


def patch_plan(plan: Plan | None, module: nn.Module, frames: Frames | None) -> PatchPlan | str:
    """Return how ``plan`` splits ``module`` into patches, or the reason why it cannot."""
    if plan is None or "hidden_states" not in parameters_of(module):
        return "no plan says which of its inputs are tokens"
    gathers = [gather for rule in plan.outputs.values() for gather in as_tuple(rule) if gather is not None]
    if (
        len(gathers) != 1
        or len(as_tuple(plan.outputs.get("", gathers[0]))) != 1
        or gathers[0].per != 1
        or gathers[0].after_replicated
        or gathers[0].then_replicated
    ):
        return "what it returns are not the tokens of one image or video"
    reason = _why_not(plan)
    if reason is not None:
        return reason
    rule, segment = plan.inputs.get("hidden_states"), gathers[0].segment
    # The output has the form of the input, because schedulers add them.
    of_tokens = "" in plan.outputs or (isinstance(rule, Split) and rule.segment == segment)
    if of_tokens and gathers[0].dim == 1:
        return PatchPlan(plan, segment, dim=1, together=1, ndim=3)
    if frames is None or of_tokens:
        return (
            "it makes tokens from its input, and its adapter does not say from which part (Adapter(frames=Frames(...)))"
        )
    return PatchPlan(plan, segment, frames.dim, frames.of_one(module), ndim=5)


def _why_not(plan: Plan) -> str | None:
    cuts = [*plan.inputs.values(), *[cut for rules in plan.inner.values() for cut in rules.values()]]
    if plan.halos or not all(isinstance(cut, (Split, Replicate, FirstTokens, LastTokens, Entries)) for cut in cuts):
        return "some of its modules need the tokens of other patches"
    if any(isinstance(cut, Split) and (cut.then_replicated or cut.after_replicated) for cut in cuts):
        return "its tokens share a tensor with others"
    rules_of_attention = plan.attention.values()
    if any(isinstance(rule, AttentionByHeads) for rule in rules_of_attention):
        return "its attention needs the tokens of all patches at once"
    if not all(isinstance(rule, tuple) and all(call.mask != "pairs" for call in rule) for rule in rules_of_attention):
        return "it attends to sums, to lists, or by a mask of pairs of tokens"
    return None


def patch_rows(total: int, num_patches: int, what: str = "tokens") -> list[Rows]:
    """Return begin and length of each patch. The split is that of ``torch.tensor_split``.

    >>> patch_rows(10, 4)
    [(0, 3), (3, 3), (6, 2), (8, 2)]

    Raises:
        ValueError: There are more patches than entries. ``what`` names the entries.
    """
    if num_patches > total:
        raise ValueError(f"{total} {what} cannot be split into num_patches={num_patches} patches. Choose fewer.")
    sizes = [(total + num_patches - 1 - patch) // num_patches for patch in range(num_patches)]
    return [(sum(sizes[:patch]), size) for patch, size in enumerate(sizes)]


class PatchCuts(RuleExecutor):
    """Applies the rules of a plan for patch ``index`` of ``count``, without other ranks and without communication.

    Args:
        units: Number of frames, whose tokens stay together; None if tokens are split individually.
    """

    def __init__(self, plan: PatchPlan, index: int, count: int, units: int | None) -> None:
        super().__init__(SequenceMesh(dim_of_one("ring"), MeshDim("ulysses", count, index, "", None), "cpu"))
        self._units = units
        cuts = [*plan.plan.inputs.values(), *[cut for rules in plan.plan.inner.values() for cut in rules.values()]]
        self._in_first_patch = {cut.segment for cut in cuts if isinstance(cut, Split)} - {None, plan.segment}

    def new_segment(self, name: str, total: int) -> Segment:
        """Return the segment of ``total`` tokens: all in the first patch, or frame by frame.

        Raises:
            ValueError: The tokens do not divide evenly over the frames.
        """
        if name in self._in_first_patch:
            return Segment(name, total, together=max(total, 1))
        units = self._units or total
        if total % units:
            raise ValueError(f"{name} has {total} entries; expected a multiple of the {units} frames.")
        return Segment(name, total, together=max(total // units, 1))

    def fewest_on_a_rank(self, name: str) -> int:
        """Return 1: models see the tokens of all patches, so a single token is not taken for a decoding step."""
        return 1

    def put_together(self, part: Tensor, dim: int, layout: SequenceLayout) -> Tensor:
        """Return a whole tensor with ``part`` in the place of this patch, and zeros elsewhere."""
        shape = list(part.shape)
        shape[dim] = layout.total
        whole, start = part.new_zeros(shape), 0
        for begin, length in layout.runs(self.mesh.rank):
            whole.narrow(dim, begin, length).copy_(part.narrow(dim, start, length))
            start += length
        return whole

    def with_equal_bits(self, value: Tensor, dim: int, segment: Segment) -> Tensor:
        """Return ``value`` itself, because one rank computes a patch."""
        return value

    def rows(self, names: tuple[str, ...], held: int) -> tuple[list[Rows], int] | None:
        """Return the rows of this patch's tokens in the segments ``names``, and the number of tokens of all patches.

        Returns None if ``held``, the number of tokens of this patch, does not fit the plan. At most one segment may
        have an unknown length; it is replicated.
        """
        unknown = [name for name in names if name not in self.segments]
        rest = held - sum(self.segments[x].size(self.mesh.rank, self.mesh.ranks) for x in names if x not in unknown)
        if rest < 0 or len(unknown) > 1 or (rest and not unknown):
            return None
        segments = [self.segments.get(name) or Segment(name, rest, replicated=True) for name in names]
        layout = SequenceLayout(tuple(segments), self.mesh.ranks)
        return list(layout.runs(self.mesh.rank)), layout.total

    def cuts(self, names: tuple[str, ...]) -> bool:
        """Whether one of these segments is split."""
        return any(name in self.segments and not self.segments[name].replicated for name in names)


class PatchPlaces:
    """Wrappers that apply a plan's rules to the submodules of ``module`` for one patch. :attr:`cutting` is the patch of
    the current call, or None.

    Attributes:
        kinds: All kinds of attention calls in the plan. A call is identified by its index in this tuple.
        default: The indices of calls in modules that the plan does not name.
    """

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self.module = module
        self.cutting: PatchCuts | None = None
        self._matches = match_modules(module, plan)
        rules_by_name = [rules.attention for _, rules in self._matches.values() if isinstance(rules.attention, tuple)]
        self.kinds = tuple(
            dict.fromkeys([Attention(plan.joint_order), *[call for rule in rules_by_name for call in rule]])
        )
        self.default = (0,)
        # A stack of (kinds of a module's attention calls, their number so far), the innermost module last. In graphs a
        # stack of modes does this.
        self._attending: list[tuple[tuple[int, ...], list[int]]] = []
        self._in_graphs = False

    def begin(self, cutting: PatchCuts | None, *, in_graphs: bool = False) -> None:
        """Set the patch of the next call of the model; None after the call.

        Args:
            in_graphs: Whether blocks are compiled or the plan intercepts by a mode. :class:`PatchAttnMode` then
                identifies attention calls.
        """
        self.cutting, self._attending, self._in_graphs = cutting, [(self.default, [0])], in_graphs

    def next_attention(self) -> Attention:
        """Return the segments of the next attention call."""
        attending, calls = self._attending[-1]
        calls[0] += 1
        return self.kinds[attending[min(calls[0], len(attending)) - 1]]

    @contextmanager
    def attending_to(self, kinds: tuple[int, ...]) -> Iterator[None]:
        """Identify the attention calls inside the block as these ``kinds``, counted from 0."""
        if self._in_graphs:
            with PatchAttnMode(kinds):
                yield
            return
        self._attending.append((kinds, [0]))
        try:
            yield
        finally:
            self._attending.pop()

    def install(self) -> None:
        groups: dict[tuple[ModuleRules, tuple[str, ...]], list[nn.Module]] = {}
        for submodule, rules in self._matches.values():
            groups.setdefault((rules, parameters_of(submodule)), []).append(submodule)
        for (rules, parameters), submodules in groups.items():
            around = self._inputs(rules, parameters)
            wrap_alike(submodules, "__call__", _INPUTS, around, order=WrapperPriority.PATCH)
            cuts = {key: cut for key, cut in rules.cuts if isinstance(key, int)}
            if cuts:
                outputs = self._outputs(rules.name, cuts)
                wrap_alike(submodules, "__call__", _OUTPUTS, outputs, order=WrapperPriority.PATCH_OUTPUTS)

    def remove(self) -> None:
        for submodule, _ in self._matches.values():
            unwrap(submodule, _INPUTS)
            unwrap(submodule, _OUTPUTS)

    def _inputs(self, rules: ModuleRules, parameters: tuple[str, ...]) -> Any:
        cuts = {key: cut for key, cut in rules.cuts if isinstance(key, str)}
        attention = rules.attention if isinstance(rules.attention, tuple) else ()
        kinds = tuple(self.kinds.index(call) for call in attention)

        def attend(call: Any, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # This may be traced, so nothing here may differ from patch to patch.
            if self.cutting is None or not kinds:
                return call(module, *args, **kwargs)
            with self.attending_to(kinds):
                return call(module, *args, **kwargs)

        def cut_and_gather(call: Any, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            cutting = self.cutting
            if cutting is None:
                return call(module, *args, **kwargs)
            args, kwargs = cutting.arguments(cuts, parameters, args, kwargs, rules.name)
            output = attend(call, module, *args, **kwargs)
            return cutting.outputs(output, rules.gathers) if rules.gathers else output

        return cut_and_gather if cuts or rules.gathers else attend

    def _outputs(self, name: str, cuts: Mapping[int, Any]) -> Any:
        def around(call: Any, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            output = call(module, *args, **kwargs)
            return output if self.cutting is None else self.cutting.outputs_at(output, cuts, name)

        return around
