"""The contract of an optional option of attention: what its value may change in a call.

:mod:`.features` lists the classes. The core asks the values that a call has, and names none of them. Imports
no torch, so that a command can validate a value at once.

The subclasses are in :mod:`.rounding`, :mod:`.block_sparse` and :mod:`.kept_keys`; :mod:`.attention_options`,
:mod:`.spec`, :mod:`.usp` and the gradient ask them. Tests: those of the subclasses, such as
tests/attention/test_block_sparse.py and tests/attention/approximate/.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from torch import Tensor

    from para_core.attention.attention_plan import AttentionPlan
    from para_core.attention.ring_plan import RingStyle
    from para_core.attention.tiles import PositionalMask
    from para_core.attention.wire import Wire


class AttentionOption:
    """The value of one option of attention. A subclass is a frozen dataclass, and overrides what it changes.

    Attributes:
        option: The name of the option.
        by_position: Whether the positions of tokens in the sequence decide which keys a query sees: directly,
            by a mask over blocks of positions, or because queries at some positions are observed to choose
            the keys. Then

            - the layouts of the call must say the positions of all tokens (``mesh_attention.py``);
            - queries are brought into the order of the sequence (``spec.py``);
            - plain SDPA alone does not compute the call (``attention_plan.py``, and ``modes/unified.py`` on
              one rank);
            - Attention2D, which knows no such masks, is replaced by a ring (``grid_2d.py``);
            - two such options exclude each other, because observed queries would choose keys that a mask
              hides (``attention_options.py``);
            - calls that the option cannot change are refused (``local.py``, ``modes/flex_attention.py``).
        needs_all_ranks: Whether a call involves all ranks even if every rank holds all keys.
        by_step: Whether an AttentionSchedule may choose it for some steps.
        has_gradient: Whether it applies to calls that require a gradient, too. Otherwise these leave it out.
        wire: The format in which tensors are sent; None to leave the usual one.
        mask: A mask by position that applies to every call, or None.
        attend: Computes attention to the keys of all ring ranks in place of
            :func:`~para_core.attention.usp.attend_all`, with its arguments and ``save``; or None. An option
            that has it must be ``by_position``: otherwise plain SDPA may compute the call without it, and
            another option could have one too, and only the last one would run.
    """

    option: ClassVar[str]
    by_position: ClassVar[bool] = False
    needs_all_ranks: ClassVar[bool] = False
    by_step: ClassVar[bool] = False
    has_gradient: ClassVar[bool] = True
    # No fields of the subclasses, which are dataclasses, because this class is none.
    wire: Wire | None = None
    mask: PositionalMask | None = None
    attend: Callable[..., tuple[Tensor, Tensor]] | None = None

    def __init_subclass__(cls) -> None:
        if cls.attend is not AttentionOption.attend and not cls.by_position:
            raise TypeError(
                f"{cls.__name__} has attend and is not by_position; expected both, because plain SDPA would leave "
                "attend out, and another option could replace it."
            )

    @classmethod
    def read(cls, value: Any) -> Self:
        """Return the option for the ``value`` that a user passes, by default an instance of the class.

        Raises:
            TypeError, ValueError: The value is invalid.
        """
        if not isinstance(value, cls):
            raise TypeError(f"{cls.option} is {value!r}; expected a {cls.__name__}, or None.")
        return value

    @property
    def fields(self) -> tuple[Any, ...]:
        """The arguments of the constructor in order, JSON values: :meth:`AttnOptions.read` passes them to it."""
        raise NotImplementedError

    @property
    def record(self) -> object:
        """The JSON value that ranks compare, and show if it differs."""
        return [*self.fields]

    def check_method(self, rotate_method: str) -> None:
        """Raise ``ValueError`` if the option excludes this way of passing keys on.
        By default it excludes none.
        """

    def check_lengths(self, num_queries: int, num_keys: int) -> None:
        """Raise ``ValueError`` if a call with these lengths of the whole sequences does not fit.
        By default all do.
        """

    def style_of(self, chosen: type[RingStyle]) -> type[RingStyle]:
        """Return the way in which keys reach other ring ranks: by default ``chosen``, that of the user's option."""
        return chosen

    def mask_of_gradient(
        self, plan: AttentionPlan, query: Tensor, key: Tensor, mask: Tensor | None, heads: Tensor | None
    ) -> Tensor | None:
        """Return the mask tensor with which attention to all keys has the gradient of the call: by default
        ``mask``.

        An override may be collective, because the backward runs on every rank.
        """
        return mask
