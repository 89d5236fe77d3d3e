"""The description of a model's transformer blocks for a cache, and the roles of the blocks derived from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from para_core.distributed.cached_property import cached_property
from para_core.instance.private_class import original_class
from para_core.plans.module_matching import parameters_of


@dataclass(frozen=True)
class BlockGroup:
    """Consecutive transformer blocks with the same inputs and outputs, which a cache skips together.

    Args:
        lists (`tuple[str, ...]`): Names of the model's module lists that contain the blocks, in the order in
            which they run.
        streams (`tuple[str, ...]`, defaults to `("hidden_states",)`): Parameters of a block's ``forward``
            whose new values it returns, in the order in which it returns them. A block with one stream
            returns the tensor itself. If a parameter is a dataclass, its name means all fields with tensors,
            and ``"video.x"`` means one field.
        measured (`str`, defaults to `"hidden_states"`): The stream whose change is compared from step to
            step.
        chained (`bool`, defaults to `False`): Whether the model only passes the streams from block to block,
            and gives all blocks the same other arguments. A compiled graph then skips all blocks of the group
            with one ``torch.cond``.
        between (`tuple[str, ...]`, defaults to `()`): Names of arguments of the model, such as residuals of a
            ControlNet. If one of them is passed, the model computes something between its blocks although
            ``chained`` is set.
        samples (`int`, defaults to `0`): Index of the batch dim of ``measured``: 0 for ``[B, S, C]``, 1 for
            ``[S, B, C]``.

    Raises:
        TypeError, ValueError: A value is not a tuple of names, ``lists`` or ``streams`` is empty, or
            ``measured`` is not a stream.
    """

    lists: tuple[str, ...]
    streams: tuple[str, ...] = ("hidden_states",)
    measured: str = "hidden_states"
    chained: bool = False
    between: tuple[str, ...] = ()
    samples: int = 0

    def __post_init__(self) -> None:
        for name in ("lists", "streams", "between"):
            _check_names("BlockGroup", name, getattr(self, name))
        if not self.lists or not self.streams:
            raise ValueError(
                f"BlockGroup(lists={self.lists}, streams={self.streams}): name at least one list and one stream."
            )
        if self.measured not in self.streams:
            raise ValueError(f"measured is {self.measured!r}; expected one of the streams {self.streams}.")


@dataclass(frozen=True)
class CachedBlocks:
    """The block stack of a model, in groups.

    A new group begins where the tensors that a block takes and returns change, for example where text and
    image tokens are concatenated.

    Args:
        groups (`tuple[BlockGroup, ...]`): The groups in the order in which they run.
        conditions (`tuple[str, ...]`, *optional*): Arguments of the model that differ between CFG branches
            and stay equal from step to step, or fields of dataclasses in them (``"video.text"``). They
            identify the branch if the pipeline does not name it. Defaults to ``encoder_hidden_states``, if
            the model has it.
        uncached (`tuple[str, ...]`, defaults to `()`): Names of arguments of the model, such as layers to
            skip. A call with one of them runs without the cache.
        modulated (`Callable`, *optional*): ``modulated(block, arguments)`` returns the input ``[B, S, C]`` of
            the first block after its normalization and modulation by the timestep, given the block and its
            arguments. Required for rules that decide a step before the first block runs.

    Raises:
        TypeError, ValueError: A value is not a tuple of the expected kind, or there is no group.
    """

    groups: tuple[BlockGroup, ...]
    conditions: tuple[str, ...] | None = None
    uncached: tuple[str, ...] = ()
    modulated: Callable[[nn.Module, Mapping[str, Any]], Tensor] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.groups, tuple) or not all(
            isinstance(group, BlockGroup) for group in self.groups
        ):
            raise TypeError(
                f"CachedBlocks(groups={self.groups!r}): expected a tuple of BlockGroups: "
                "CachedBlocks((BlockGroup(...),))."
            )
        if not self.groups:
            raise ValueError("CachedBlocks(groups=()): name at least one BlockGroup.")
        for name in ("conditions", "uncached"):
            if getattr(self, name) is not None:
                _check_names("CachedBlocks", name, getattr(self, name))


def _check_names(cls: str, name: str, value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
        example = "('…',)"
        if isinstance(value, str):
            example = f"('{value}',)"
        raise TypeError(f"{cls}({name}={value!r}): expected a tuple of names: {name}={example}.")


@dataclass(frozen=True)
class BlockRole:
    """The part that a block plays for the cache. Blocks with equal roles share a class, and therefore a
    compiled graph.

    ``streams``, ``measured``, ``chained`` and ``samples`` are the settings of the :class:`BlockGroup` with
    index ``group``.

    Args:
        parameters: Names of the parameters of the block's ``forward``.
        opens: Whether this is block 0 of the model, whose input is recorded to compute the first-block
            residual.
        decides: Whether the cache decides after this block to skip or compute the rest.
        enters, exits: Whether this is the first (last) block of its group that may be skipped. After the last
            one the residual of the group is stored or added.
        skipped: Whether the cache may skip this block.
    """

    group: int
    streams: tuple[str, ...]
    parameters: tuple[str, ...]
    measured: str
    opens: bool
    decides: bool
    enters: bool
    skipped: bool
    exits: bool
    chained: bool
    samples: int

    @cached_property
    def stream_parameters(self) -> tuple[str, ...]:
        """The parameters that hold the streams, in the order in which the block returns them."""
        return tuple(dict.fromkeys([name.partition(".")[0] for name in self.streams]))

    def given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters that hold streams, with their values; None if one was not passed."""
        arguments = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        given = {}
        for name in self.stream_parameters:
            given[name] = arguments.get(name)
        return given

    def _are_plain(self, values: Iterable[Any]) -> bool:
        """Whether each stream is a whole parameter, and each of ``values`` is a tensor or None, as in most models."""
        if self.stream_parameters != self.streams:
            return False
        # A generator would add a Python call for each value to each call of a block.
        for value in values:  # noqa: SIM110
            if value is not None and not isinstance(value, Tensor):
                return False
        return True

    def has_fields(self, given: Mapping[str, Any]) -> bool:
        """Whether some streams are fields of dataclasses."""
        return any(value is not None and not isinstance(value, Tensor) for value in given.values())

    def tensors(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the tensors of all streams, with None for a stream that is None. A dataclass may hold
        several.

        Raises:
            TypeError: A stream is not a tensor, or a dataclass that holds tensors.
        """
        if self._are_plain(given.values()):
            return tuple(given.values())
        return tuple([x for name in self.streams for _, x in self._leaves(name, given)])

    def as_output(self, given: Mapping[str, Any], values: tuple[Any, ...]) -> Any:
        """Return the streams with these ``values`` as a block returns them: one as a tensor, several as a
        tuple.

        A dataclass keeps its other fields, and those whose value is None.
        """
        if self._are_plain(given.values()):
            if len(values) == 1:
                return values[0]
            return values
        outputs = dict(given)
        remaining = list(values)
        for name in self.streams:
            parameter = name.partition(".")[0]
            for path, _ in self._leaves(name, given):
                value = remaining.pop(0)
                if not path:
                    outputs[parameter] = value
                elif value is not None:
                    outputs[parameter] = _with_field(outputs[parameter], path, value)
        if len(outputs) == 1:
            return next(iter(outputs.values()))
        return tuple(outputs.values())

    def measured_index(
        self, given: Mapping[str, Any], before: tuple[Any, ...], after: tuple[Any, ...]
    ) -> int:
        """Return the index of the measured tensor: if it is a dataclass, of its first float field that
        changed.

        Raises:
            ValueError: The stream is a dataclass, and the block changed none of its float fields.
        """
        if self._are_plain(given.values()):
            return self.streams.index(self.measured)
        begin = sum(
            len(self._leaves(name, given)) for name in self.streams[: self.streams.index(self.measured)]
        )
        leaves = self._leaves(self.measured, given)
        if len(leaves) == 1:
            return begin
        for index in range(begin, begin + len(leaves)):
            if after[index] is not before[index] and after[index].is_floating_point():
                return index
        parameter = self.measured.partition(".")[0]
        fields_of_it = ", ".join([".".join((parameter, *path)) for path, _ in leaves])
        raise ValueError(
            f"BlockGroup(measured={self.measured!r}): the block returned it with no other float tensor in a field; "
            f"expected a change in one of {fields_of_it}. Name a stream that the block changes."
        )

    def _leaves(self, name: str, given: Mapping[str, Any]) -> list[_FieldValue]:
        """Return the paths of the fields that hold the tensors of the stream ``name``, and the tensors."""
        parameter, *path = name.split(".")
        value = given[parameter]
        for field_name in path:
            if value is None:
                break
            if not hasattr(value, field_name):
                raise TypeError(
                    f"BlockGroup(streams={self.streams}): a {type(value).__name__} has no field {field_name!r}."
                )
            value = getattr(value, field_name)
        leaves = _tensor_fields(tuple(path), value)
        if not leaves:
            raise TypeError(
                f"BlockGroup(streams={self.streams}): {name} is a {type(value).__name__}; expected a tensor, a "
                "dataclass that holds tensors, or None."
            )
        return leaves

    def check_outputs(self, block: nn.Module, inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
        """Return the block's ``output`` as a tuple of streams.

        A block may broadcast one sample to a batch: the text of FLUX, if one negative prompt is given for
        several images. A graph has a fixed shape for a block that it may skip, so there it may not.

        Raises:
            ValueError: The number or the shapes of the outputs differ from those of ``inputs``, the streams
                passed to the block.
        """
        returned = as_tuple(output)
        if len(returned) == len(inputs) and self._are_plain(returned) and not torch.compiler.is_compiling():
            for x, y in zip(inputs, returned, strict=True):
                if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape):
                    break
            else:
                return returned
        names = self.stream_parameters
        outputs = returned
        if len(names) == len(returned):
            outputs = self.tensors(dict(zip(names, returned, strict=True)))
        before = _shapes_of(inputs)
        after = _shapes_of(outputs)
        broadcasts = not (self.skipped and torch.compiler.is_compiling())
        if len(before) != len(after) or not all(
            x is None or y is None or x == y or (broadcasts and self._is_broadcast(x, y))
            for x, y in zip(before, after, strict=True)
        ):
            raise ValueError(_wrong_streams(original_class(block).__name__, self.streams, before, after))
        return outputs

    def _is_broadcast(self, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
        """Whether the shapes differ only in the number of samples, which was 1."""
        dim = self.samples
        others = [x[:dim] + x[dim + 1 :] for x in (before, after)]
        return len(before) == len(after) and others[0] == others[1] and before[dim : dim + 1] == (1,)


def _module_list(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        raise ValueError(
            f"{type(module).__name__} has no {name!r}, which the description of its blocks names. Name its module "
            "lists in BlockGroup(lists=...)."
        ) from None


def roles_of(
    module: nn.Module, blocks: CachedBlocks, first_blocks: int = 1, last_blocks: int = 0
) -> list[tuple[nn.Module, BlockRole]]:
    """Return ``(block, role)`` for all blocks that need a hook, in the order in which they run.

    The ``first_blocks`` and ``last_blocks`` always run. Of these, only block 0 and the last one of
    ``first_blocks`` get a hook: the residual is measured between them.

    Raises:
        ValueError: The model does not have the blocks that ``blocks`` names, or no block would be skipped.
    """
    stack = [
        (index, group, block)
        for index, group in enumerate(blocks.groups)
        for name in group.lists
        for block in _module_list(module, name).children()
    ]
    first = first_blocks
    stop = len(stack) - last_blocks
    in_first_group = sum(group_index == 0 for group_index, _, _ in stack)
    if first >= stop or first > in_first_group:
        raise ValueError(
            f"{type(module).__name__} has {len(stack)} blocks, {in_first_group} of them in its first group; with "
            f"first_blocks={first} and last_blocks={last_blocks} none is left to skip. Choose fewer."
        )
    skipped = range(first, stop)
    roles = []
    for index, (group_index, group, block) in enumerate(stack):
        parameters = parameters_of(block)
        missing = [name for name in group.streams if name.partition(".")[0] not in parameters]
        if missing:
            raise ValueError(
                f"{type(block).__name__} has no parameter {missing[0]!r}; its forward takes {parameters}."
            )
        of_group = [i for i in skipped if stack[i][0] == group_index]
        role = BlockRole(
            group=group_index,
            streams=group.streams,
            parameters=parameters,
            measured=group.measured,
            opens=index == 0,
            decides=index == first - 1,
            enters=bool(of_group) and index == of_group[0],
            skipped=index in skipped,
            exits=bool(of_group) and index == of_group[-1],
            chained=group.chained,
            samples=group.samples,
        )
        if role.opens or role.decides or role.skipped:
            roles.append((block, role))
    return roles


def as_tuple(output: Any) -> tuple[Any, ...]:
    """Return the output of a block as a tuple: a tensor or a dataclass is its only item."""
    if isinstance(output, Tensor) or is_dataclass(output):
        return (output,)
    return tuple(output)


# The names of the fields that lead from an argument to a tensor, and the tensor.
_FieldValue = tuple[tuple[str, ...], Any]


def _tensor_fields(path: tuple[str, ...], value: Any) -> list[_FieldValue]:
    if value is None or isinstance(value, Tensor):
        return [(path, value)]
    if not is_dataclass(value):
        return []
    items = [(each.name, getattr(value, each.name)) for each in fields(value)]
    return [leaf for name, item in items if item is not None for leaf in _tensor_fields((*path, name), item)]


def tensors_in(items: Iterable[tuple[str, Any]]) -> list[tuple[str, Tensor]]:
    """Return the tensors in these named arguments, also those in fields of dataclasses, with their names."""
    leaves = [(".".join(path), x) for name, value in items for path, x in _tensor_fields((name,), value)]
    return [(name, x) for name, x in leaves if x is not None]


def _with_field(value: Any, path: tuple[str, ...], new: Any) -> Any:
    """Return the dataclass ``value`` with ``new`` in the field at ``path``."""
    if len(path) > 1:
        new = _with_field(getattr(value, path[0]), path[1:], new)
    return replace(value, **{path[0]: new})


# The shapes of a block's streams, with None for a stream whose value is None.
_Shapes = list[tuple[int, ...] | None]


def _shapes_of(streams: Iterable[Any]) -> _Shapes:
    shapes: _Shapes = []
    for x in streams:
        if isinstance(x, Tensor):
            shapes.append(tuple(x.shape))
        else:
            shapes.append(None)
    return shapes


def _wrong_streams(cls: str, streams: tuple[str, ...], before: _Shapes, after: _Shapes) -> str:
    shapes = f"was given {streams} of shapes {before}, and returned shapes {after}"
    # Shapes that differ in one dim, which is neither the first (batch) nor the last (channels).
    sharded = [
        len(x) == len(y)
        and x[0] == y[0]
        and x[-1] == y[-1]
        and sum(a != b for a, b in zip(x, y, strict=True)) == 1
        for x, y in zip(before, after, strict=False)
        if x and y
    ]
    reordered = sorted(map(str, before)) == sorted(map(str, after))
    if not reordered and len(before) == len(after) and any(sharded):
        return (
            f"{cls} {shapes}: tokens were sharded or gathered inside this block, by a hook on it or by its own code. "
            "The cache runs outside the block and its hooks, and needs the same tokens before and after it. Shard "
            "before the block stack: the model's inputs, or with a plan: Plan(inner={'blocks.0': {...: Split(...)}})."
        )
    return (
        f"{cls} {shapes}. Name in BlockGroup(streams=...) the parameters whose new values it returns, in the order in "
        "which it returns them."
    )
