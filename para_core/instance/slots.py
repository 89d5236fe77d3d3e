"""The slots of an instance, in the order in which calls of its methods pass them."""

from __future__ import annotations

from enum import IntEnum, auto


class Slot(IntEnum):
    """A named place for one feature in the record of an instance, from the outermost to the innermost.

    A feature registers itself by its line here, and uses its slot on every instance that it changes. The
    order of the lines is the order in which a call passes the features, so a line that moves changes what
    runs inside what. It holds for the fillings of one method: all of those around ``__call__`` run outside of
    those around ``forward`` (TENSOR_WEIGHTS of a layer, for example), whatever their lines are.

    A slot whose feature moves or gathers weights must be named in ``verify/verification.py``
    (``_SLOTS_OF_WEIGHTS``), too, because a verification calls the unmodified model with these slots only.
    """

    # An instance whose weights are incomplete raises before anything else runs.
    UNUSABLE = auto()
    # A rank that only encodes prompts stops before other features prepare the call of a denoiser.
    ENCODE_FIRST = auto()
    # A progress callback sees every step of a modular pipeline.
    STEP_CALLBACK = auto()
    # Kept outputs of text encoders are returned before the ranks meet.
    ENCODED_PROMPTS = auto()
    # Ranks check that they all make the same call before any feature below communicates.
    PARALLEL_PIPE = auto()
    FIRST_RANK = auto()
    WEIGHTS = auto()
    # Weights are loaded once per call of an autoencoder, not once per tile.
    VAE_OFFLOAD = auto()
    PARALLEL_VAE = auto()
    # CFG parallelism runs outside the cache, so that the cache sees only the CFG branches that this rank
    # computes.
    GUIDANCE = auto()
    CHECKED_CALLBACK = auto()
    # A rank verifies the CFG branches that it computes, with everything inside that may change their result.
    VERIFIED = auto()
    # The cache identifies CFG branches from unsharded arguments, so it runs outside the plan.
    CACHE = auto()
    SCHEDULED_ATTENTION = auto()
    SCHEDULER_TRACKER = auto()
    # Pipeline stages exchange gathered tensors, so they run outside the plan.
    PIPEFUSION = auto()
    STAGES = auto()
    PATCH_INPUTS = auto()
    TENSOR_WEIGHTS = auto()
    LORA = auto()
    STAGED_WEIGHTS = auto()
    STAGED_MERGE = auto()
    PARALLEL_DENOISER = auto()
    # Outside of what computes a product with other rows, so that it finds the same kernel.
    PRODUCTS = auto()
    # All ranks have the same arguments outside of the plan, so they check the same calls.
    SAME_BITS = auto()
    PLAN = auto()
    # Inside the plan, the inputs of the plan are this rank's part; tokens that a submodule shards later are
    # not yet.
    SAME_BITS_PRODUCTS = auto()
    ATTENTION_CHECK = auto()
    # If a submodule returns all tokens, PipeFusion takes its patch of them inside the plan, before the plan
    # shards the output.
    PATCH_OUTPUTS = auto()
    # The cache compares the sharded outputs of blocks, so the cached block runs inside the plan.
    CACHED_BLOCK = auto()
    # Stages run inside the cache, because a block that the cache skips must not wait for another stage.
    FUSED_BLOCK = auto()
    STAGED_BLOCK = auto()
    # Offloading is innermost, so that weights are copied to the device only for a block that runs.
    OFFLOADED_BLOCK = auto()

    @property
    def label(self) -> str:
        """The name of the slot in messages."""
        return self.name.lower().replace("_", " ")
