"""The options of a parallel pipeline that have the same values in Python, in recipes and in commands.

``parallelize_pipe`` takes them as keyword arguments, a ``Recipe`` has them as fields, ``para_core`` as
options, and the pages list them. Options with other values in Python than in a recipe, or that no recipe has,
are declared in ``adapters/parallel/options.py``, and the fields that only a recipe has in ``fleet/recipe.py``,
with its own form of the former, for example the name of a dtype for ``comm_dtype``. Imports no torch, so
that a command can validate its options at once. Tests: tests/cli/test_help.py, tests/fleet/test_recipe.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Self

from para_core.attention.schedule import AttentionSchedule
from para_core.declared_options import Command, Option
from para_core.option_values import (
    BACKENDS,
    EXACT_FORM,
    Backend,
    Products,
    RotateMethod,
    TextEncoders,
    VaePlacement,
)

# The panels of ``para_core generate --help`` that list options of a pipeline.
PIPELINE, RANKS = "Pipeline", "Ranks"
_IN_HOST_MEMORY = ("offload", "first")


@dataclass(frozen=True, kw_only=True)
class AttentionChoices:
    """Options of the attention of a transformer on several ranks."""

    rotate_method: Annotated[
        RotateMethod | None,
        Option(
            200,
            "How keys and values travel around the ring: from neighbour to neighbour; all at once; in a "
            "grid of ring ranks, where queries travel along rows and keys along columns; or all at once, "
            "before one attention to them, which has the bits of one process. All are exact. "
            'Defaults to `"alltoall"`, or to the prediction of `plan_mesh` if there is no `mesh`.',
            default='`"alltoall"`, or as the planner predicts',
            needs_ranks=True,
            command=Command("Ring: alltoall, allgather, 2d, gathered.", "HOW", RANKS),
        ),
    ] = None
    backend: Annotated[
        Backend | AttentionSchedule | None,
        Option(
            65,
            "The backend of local attention in the transformers, also on one rank: one of PyTorch's, "
            '`"triton"` (docs/kernels.md), or a library that is installed: `"flash3"`, `"flash4"`. '
            '`"triton-int8"` and `"sage"` are **not exact**; an `AttentionSchedule` confines them to the '
            "steps in the middle. Defaults to the choice of SDPA, or on several ranks to what the "
            "transformer's own `set_attention_backend` names (docs/pipelines.md).",
            form="`str` or `AttentionSchedule`",
            default="see below",
            page="own_model.md#attention-of-your-own-on-each-device",
            expected=f"one of {', '.join(BACKENDS)}, an AttentionSchedule",
            command=Command("Local attention: cudnn, flash3, sage...", "NAME", PIPELINE),
        ),
    ] = None
    cross_backend: Annotated[
        Backend | None,
        Option(
            70,
            "The backend of attention to another sequence, such as the text of Wan. Defaults to the choice"
            " of SDPA, or to `backend` if that sequence is sharded.",
            form="`str`",
            default="see below",
            expected=f"one of {', '.join(BACKENDS)}",
            command=Command("Attention to another sequence.", "NAME", PIPELINE),
        ),
    ] = None
    products: Annotated[
        Products | None,
        Option(
            75,
            "What computes the matrix products of the transformers (linear layers), also on one rank: "
            '`"triton"` is a kernel with one tile shape and one order of sums, so that the bits of a row do not '
            "depend on the number of rows. With `same_bits=True` and this option, a process with the same option "
            "and one rank has the same bits, whatever cuBLAS does. Batched products and convolutions are computed "
            "as ever; quantized weights and tensor parallelism are refused. Defaults to PyTorch, and on a GPU to "
            "cuBLAS.",
            default="PyTorch",
            page="same_bits.md#products-of-one-tile-shape",
            none="for those of PyTorch",
            command=Command("triton: bits do not depend on rows.", "HOW", PIPELINE),
        ),
    ] = None
    verify: Annotated[
        bool,
        Option(
            270,
            "Whether to compare the transformers with the unmodified ones, which run on the whole inputs: "
            "at the first call with each size, and again after code inside them has changed. It costs one "
            "more call of the transformer, and its memory. If they differ by more than rounding, every "
            "rank raises and names the first module that differs; if not, the error is logged at level "
            "INFO.",
            page="pipelines.md#code-of-your-own-and-verifytrue",
            command=Command("Compare each new size with the unmodified model.", "", RANKS),
        ),
    ] = False
    same_bits: Annotated[
        bool,
        Option(
            275,
            "Whether the transformers have the bits of one process, on any number of ranks: on this machine, "
            "with this torch and these settings. Matrix products with few rows are computed with the rows of "
            "one process. At the first call with each size, each kind of function is compared on this rank's "
            "rows and on those of one process; if one differs, every rank raises and names it. A ring gathers "
            'all keys first, by `rotate_method="gathered"`: nothing overlaps with that, and a rank holds all '
            "keys and values of a layer, B · H_kv / U · S · (D + D_v) elements for U Ulysses ranks. With "
            "`vae=True` the autoencoder has them, too. What cannot have the bits of one process is refused: "
            '`rotate_method` `"alltoall"` and `"2d"`, `weights="tensor"`, `comm_dtype`, PipeFusion, sums of '
            "linear attention, `torch.compile`.",
            page="same_bits.md",
            command=Command("The bits of one process on any number of ranks.", "", RANKS),
        ),
    ] = False

    @property
    def schedule(self) -> AttentionSchedule | None:
        """The attention schedule, if ``backend`` is one; otherwise None."""
        if isinstance(self.backend, AttentionSchedule):
            return self.backend
        return None

    @property
    def backends(self) -> tuple[Backend | None, ...]:
        """The backends of local attention and of attention to another sequence.
        None stands for the choice of SDPA.
        """
        if isinstance(self.backend, AttentionSchedule):
            return (*self.backend.backends, self.cross_backend)
        return (self.backend, self.cross_backend)

    @property
    def approximate_backends(self) -> list[str]:
        """The names of the options among ``backend`` and ``cross_backend`` that select attention that is not exact."""
        names: list[str] = []
        if self.schedule is not None and self.schedule.approximates:
            names.append("backend")
        if self.backend in EXACT_FORM:
            names.append("backend")
        if self.cross_backend in EXACT_FORM:
            names.append("cross_backend")
        return names


@dataclass(frozen=True, kw_only=True)
class PipelineChoices(AttentionChoices):
    """Options of a pipeline: those of its transformers' attention, and where its components run and have weights."""

    vae: Annotated[
        bool,
        Option(
            170,
            "Whether the autoencoders of images and of sound run on all ranks as well, as with `parallelize_vae`.",
            page="vae.md",
            needs_ranks=True,
            needs_transformer=False,
            command=Command("Run the VAE on all ranks.", "", PIPELINE, opposite=True),
        ),
    ] = False
    text_encoders: Annotated[
        TextEncoders | None,
        Option(
            130,
            "Where the weights of the text encoders are: on every rank; sharded over all ranks by FSDP2; "
            "in host memory, from which each layer is copied to the device while it runs; or the same, but"
            " only the first rank runs them and sends their outputs to the others. All are exact "
            '(docs/weights.md). Defaults to `"fsdp"` if `weights` shards the transformer, and to leaving '
            "them as they are otherwise.",
            default='`"fsdp"` with sharded `weights`, else unchanged',
            page="weights.md#text-encoders",
            none="to leave them as they are",
            needs_transformer=False,
            command=Command("replicate, fsdp, offload or first.", "HOW", PIPELINE),
        ),
    ] = None
    vae_placement: Annotated[
        VaePlacement | None,
        Option(
            180,
            "Where the weights of the autoencoders of images and of sound are, as for text encoders. With "
            '`vae=True` all but `"first"` are possible. Defaults to leaving them as they are.',
            default="unchanged",
            page="weights.md#text-encoders",
            none="to leave them as they are",
            needs_transformer=False,
            command=Command("replicate, offload or first.", "HOW", PIPELINE),
        ),
    ] = None
    resident_blocks: Annotated[
        int | None,
        Option(
            150,
            "With `offload`, the number of first blocks that stay on the device, by default 1. Without "
            "`offload` it is refused. A step that a cache skips copies nothing if these include the first "
            "blocks of the cache.",
            default="1",
            expected="a number of blocks",
            at_least=0,
            command=Command("Of --offload blocks: stay on the device (1).", "N", PIPELINE),
        ),
    ] = None

    def check_vae(self) -> None:
        """Raise ValueError if the VAE runs on all ranks and on the first one alone."""
        if self.vae and self.vae_on_first_rank:
            raise ValueError(
                "vae_placement is 'first', and vae runs the VAE on all ranks; leave one out. 'offload' goes with vae."
            )

    @property
    def placements(self) -> dict[str, str]:
        """The options that place weights of single components elsewhere than on every rank's device, by name."""
        values = {"text_encoders": self.text_encoders, "vae_placement": self.vae_placement}
        return {name: value for name, value in values.items() if value not in (None, "replicate")}

    @property
    def without_placements(self) -> Self:
        """These options with all weights of components where they are by default."""
        return replace(self, text_encoders=None, vae_placement=None, resident_blocks=None)

    @property
    def places_encoders(self) -> bool:
        """Whether the user chose where the text encoders are."""
        return self.text_encoders is not None

    @property
    def placement_of_encoders(self) -> TextEncoders | None:
        """The placement of the text encoders that the user chose; None without one."""
        return self.text_encoders

    @property
    def encoders_setting(self) -> str:
        """The option that places text encoders, as a user writes it."""
        return f"text_encoders={self.text_encoders!r}"

    @property
    def shards_encoders(self) -> bool:
        """Whether the text encoders are sharded over all ranks, whatever ``weights`` shards."""
        return self.text_encoders == "fsdp"

    def with_encoders(self, placement: TextEncoders | None) -> Self:
        """Return these options with another placement of the text encoders."""
        return replace(self, text_encoders=placement)

    def encoders_or(self, default: TextEncoders) -> TextEncoders:
        """Return the placement of the text encoders that the user chose, else ``default``."""
        return self.text_encoders or default

    @property
    def encoders_in_host_memory(self) -> bool:
        """Whether the weights of the text encoders wait in host memory."""
        return self.text_encoders in _IN_HOST_MEMORY

    @property
    def placement_of_vae(self) -> VaePlacement:
        """The placement of the autoencoders, by default on every rank."""
        return self.vae_placement or "replicate"

    @property
    def vae_in_host_memory(self) -> bool:
        """Whether the weights of the autoencoders wait in host memory."""
        return self.vae_placement in _IN_HOST_MEMORY

    @property
    def vae_on_first_rank(self) -> bool:
        """Whether the first rank alone runs the autoencoders, for all ranks."""
        return self.vae_placement == "first"
