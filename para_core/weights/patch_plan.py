"""How a model is split into patches: its plan says what it shards among ranks, and patch m of M takes what rank m of M would."""

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

# Begin and length, along tokens, or along a dim of what a model is given.
Rows = tuple[int, int]
# Around what a module is given, and what of it is gathered; around what it gives that is split.
_INPUTS, _OUTPUTS = "pipefusion: inputs", "pipefusion: outputs"


@dataclass(frozen=True)
class Frames:
    """Where a model that makes tokens of a video has its frames; tokens are in their order, as many of each.

    Args:
        dim: of its ``hidden_states`` and of what it returns.
        together: the entry of its config that says how many frames become one of tokens; of a tuple, the first. None: one.
    """

    dim: int
    together: str | None = None

    def of_one(self, module: nn.Module) -> int:
        """Frames of which one is made."""
        config: Any = module.config
        found = None if self.together is None else config[self.together]
        return int((found[0] if isinstance(found, (tuple, list)) else found) or 1)


@dataclass(frozen=True)
class PatchPlan:
    """How one model is split into patches.

    Args:
        segment: of ``plan``, what is split into patches; any other that is sharded goes with the first patch, what is replicated with each.
        dim: of ``hidden_states`` and of the output, along which patches follow each other.
        together: entries along ``dim`` that stay in one patch.
        ndim: of ``hidden_states``.
    """

    plan: Plan
    segment: str
    dim: int
    together: int
    ndim: int

    @property
    def returns_patch(self) -> bool:
        """Whether the model returns the tokens of a patch, rather than a whole output of which these are filled."""
        return "" in self.plan.outputs

    def rows(self, like: Tensor, num_patches: int) -> list[Rows]:
        """Of each patch, its begin and length along ``dim`` of ``like``, the model's input.

        Raises:
            ValueError: there are too few tokens or frames, or they do not fit.
        """
        total, rest = divmod(like.shape[self.dim], self.together) if like.ndim == self.ndim else (0, 1)
        if rest:
            raise ValueError(
                f"the model is given {list(like.shape)}; PipeFusion expects {self.ndim} dims, and dim {self.dim} a multiple of {self.together}."
            )
        what = "tokens" if self.ndim == 3 else "frames of latents"
        return [(self.together * begin, self.together * size) for begin, size in patch_rows(total, num_patches, what)]


def patch_plan(plan: Plan | None, module: nn.Module, frames: Frames | None) -> PatchPlan | str:
    """How ``module`` is split into patches by ``plan``; or why it cannot be."""
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
    given, segment = plan.inputs.get("hidden_states"), gathers[0].segment
    # What is returned has the form of what is given: pipelines add one to the other.
    of_tokens = "" in plan.outputs or (isinstance(given, Split) and given.segment == segment)
    if of_tokens and gathers[0].dim == 1:
        return PatchPlan(plan, segment, dim=1, together=1, ndim=3)
    if frames is None or of_tokens:
        return "it makes tokens of its input, and it is not known of which part each (Adapter(frames=Frames(...)))"
    return PatchPlan(plan, segment, frames.dim, frames.of_one(module), ndim=5)


def _why_not(plan: Plan) -> str | None:
    cuts = [*plan.inputs.values(), *[cut for of_one in plan.inner.values() for cut in of_one.values()]]
    if plan.halos or not all(isinstance(cut, (Split, Replicate, FirstTokens, LastTokens, Entries)) for cut in cuts):
        return "some of its modules need the tokens of other patches"
    if any(isinstance(cut, Split) and (cut.then_replicated or cut.after_replicated) for cut in cuts):
        return "its tokens stand beside others in one tensor"
    calls = plan.attention.values()
    if any(isinstance(of, AttentionByHeads) for of in calls):
        return "its attention needs the tokens of all patches at once"
    if not all(isinstance(of, tuple) and all(one.mask != "pairs" for one in of) for of in calls):
        return "it attends to sums, to lists, or by a mask of pairs of tokens"
    return None


def patch_rows(total: int, num_patches: int, what: str = "tokens") -> list[Rows]:
    """Begin and length of each patch, as ``torch.tensor_split`` splits.

    >>> patch_rows(10, 4)
    [(0, 3), (3, 3), (6, 2), (8, 2)]

    Raises:
        ValueError: there are more patches than ``what``.
    """
    if num_patches > total:
        raise ValueError(f"{total} {what} cannot be split into num_patches={num_patches} patches. Choose fewer.")
    sizes = [(total + num_patches - 1 - place) // num_patches for place in range(num_patches)]
    return [(sum(sizes[:place]), size) for place, size in enumerate(sizes)]


class PatchCuts(RuleExecutor):
    """What a plan says of tensors, done for patch ``place`` of ``count``: there are no other ranks, and nothing is sent.

    Args:
        units: of ``plan.segment``, that many parts stay whole: frames, or (None) tokens.
    """

    def __init__(self, plan: PatchPlan, place: int, count: int, units: int | None) -> None:
        super().__init__(SequenceMesh(dim_of_one("ring"), MeshDim("ulysses", count, place, "", None), "cpu"))
        self._units = units
        cuts = [*plan.plan.inputs.values(), *[cut for of in plan.plan.inner.values() for cut in of.values()]]
        declared = {cut.segment for cut in cuts if isinstance(cut, Split)} - {None, plan.segment}
        self._with_the_first = declared

    def new_segment(self, name: str, total: int) -> Segment:
        """
        Raises:
            ValueError: these are not the tokens of as many frames.
        """
        if name in self._with_the_first:
            return Segment(name, total, together=max(total, 1))
        units = self._units or total
        if total % units:
            raise ValueError(f"{name} has {total} entries, which do not belong to {units} frames, as many of each.")
        return Segment(name, total, together=max(total // units, 1))

    def fewest_on_a_rank(self, name: str) -> int:
        """One: a patch attends to the tokens of the others as well."""
        return 1

    def put_together(self, part: Tensor, dim: int, layout: SequenceLayout) -> Tensor:
        """A whole tensor, in which this patch stands, and zeros elsewhere."""
        shape = list(part.shape)
        shape[dim] = layout.total
        whole, start = part.new_zeros(shape), 0
        for begin, length in layout.runs(self.mesh.rank):
            whole.narrow(dim, begin, length).copy_(part.narrow(dim, start, length))
            start += length
        return whole

    def with_equal_bits(self, value: Tensor, dim: int, segment: Segment) -> Tensor:
        """Return ``value``: patches are computed by one rank."""
        return value

    def rows(self, names: tuple[str, ...], held: int) -> tuple[list[Rows], int] | None:
        """Where the tokens of a call stand among all of them, and how many these are; ``held`` are of this patch, in segments ``names``.

        None if that is not what the plan says. At most one segment may be of unknown length: each patch holds all of it.
        """
        unknown = [name for name in names if name not in self.segments]
        rest = held - sum(self.segments[x].size(self.mesh.rank, self.mesh.ranks) for x in names if x not in unknown)
        if rest < 0 or len(unknown) > 1 or (rest and not unknown):
            return None
        found = [self.segments.get(name) or Segment(name, rest, replicated=True) for name in names]
        layout = SequenceLayout(tuple(found), self.mesh.ranks)
        return list(layout.runs(self.mesh.rank)), layout.total

    def cuts(self, names: tuple[str, ...]) -> bool:
        """Whether one of these segments is split."""
        return any(name in self.segments and not self.segments[name].replicated for name in names)


class PatchPlaces:
    """What a plan says of the submodules of ``module``, put around them; :attr:`cutting` is that of the call under way, if any.

    Attributes:
        kinds: of attention calls, all that the plan knows; a number is a place in it.
        default: numbers of calls in modules that the plan does not name.
    """

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self.module = module
        self.cutting: PatchCuts | None = None
        self._found = match_modules(module, plan)
        named = [rules.attention for _, rules in self._found.values() if isinstance(rules.attention, tuple)]
        self.kinds = tuple(dict.fromkeys([Attention(plan.joint_order), *[one for of in named for one in of]]))
        self.default = (0,)
        # Of the innermost module under way last, what its attention calls are of, and how many there were. In graphs: modes.
        self._attending: list[tuple[tuple[int, ...], list[int]]] = []
        self._in_graphs = False

    def begin(self, cutting: PatchCuts | None, *, in_graphs: bool = False) -> None:
        """From now on calls are of this patch; None: no call is under way.

        Args:
            in_graphs: blocks were compiled, or the plan intercepts by a mode, and :class:`PatchAttnMode` tells which attention it is.
        """
        self.cutting, self._attending, self._in_graphs = cutting, [(self.default, [0])], in_graphs

    def next_attention(self) -> Attention:
        """What the attention call that is made now consists of."""
        attending, calls = self._attending[-1]
        calls[0] += 1
        return self.kinds[attending[min(calls[0], len(attending)) - 1]]

    @contextmanager
    def attending_to(self, kinds: tuple[int, ...]) -> Iterator[None]:
        """Inside, attention calls are of these; they are counted anew."""
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
        alike: dict[tuple[ModuleRules, tuple[str, ...]], list[nn.Module]] = {}
        for submodule, rules in self._found.values():
            alike.setdefault((rules, parameters_of(submodule)), []).append(submodule)
        for (rules, parameters), submodules in alike.items():
            around = self._inputs(rules, parameters)
            wrap_alike(submodules, "__call__", _INPUTS, around, order=WrapperPriority.PATCH)
            cuts = {key: cut for key, cut in rules.cuts if isinstance(key, int)}
            if cuts:
                outputs = self._outputs(rules.name, cuts)
                wrap_alike(submodules, "__call__", _OUTPUTS, outputs, order=WrapperPriority.PATCH_OUTPUTS)

    def remove(self) -> None:
        for submodule, _ in self._found.values():
            unwrap(submodule, _INPUTS)
            unwrap(submodule, _OUTPUTS)

    def _inputs(self, rules: ModuleRules, parameters: tuple[str, ...]) -> Any:
        cuts = {key: cut for key, cut in rules.cuts if isinstance(key, str)}
        attention = rules.attention if isinstance(rules.attention, tuple) else ()
        kinds = tuple(self.kinds.index(one) for one in attention)

        def attend(call: Any, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # Nothing here differs from patch to patch: it is traced.
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
