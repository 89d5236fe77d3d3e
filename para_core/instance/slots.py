"""The slots of an instance, in the order in which calls of its methods pass them.

:mod:`.record` fills and empties slots, and nests their functions in this order; the features call it. Tests:
tests/instance/test_record.py for the mechanism, and those of each feature for its place.
"""

from __future__ import annotations

from enum import IntEnum, auto


class Slot(IntEnum):
    """A named place for one feature in the record of an instance, from the outermost to the innermost.

    A feature registers itself by its line here, and uses its slot on every instance that it changes. The
    order of the lines is the order in which a call passes the features, so a line that moves changes what
    runs inside what. It holds for the fillings of one method: all of those around ``__call__`` run outside of
    those around ``forward`` (TENSOR_WEIGHTS of a layer, for example), whatever their lines are. A comment
    gives the reason of each line: what the slot must be outside or inside of. "Alone" says that no other slot
    has these methods on these instances, so that its line does not matter.

    A slot whose feature moves or gathers weights must be named in :attr:`supplies_weights`, too.
    """

    # An instance whose weights are incomplete raises before anything else runs.
    UNUSABLE = auto()
    # A rank that only encodes prompts stops before other features prepare the call of a denoiser.
    ENCODE_FIRST = auto()
    # The callback of a modular pipeline runs after SCHEDULER_TRACKER has counted the step, so outside of it.
    STEP_CALLBACK = auto()
    # Kept outputs of text encoders are returned before ranks meet (FIRST_RANK, WEIGHTS) or weights move.
    ENCODED_PROMPTS = auto()
    # Ranks check that they all make the same call before any feature below communicates.
    PARALLEL_PIPE = auto()
    # The other ranks wait for the output of the first one, and load no weights (VAE_OFFLOAD).
    FIRST_RANK = auto()
    # Ranks compare the calls of a text encoder with sharded weights before FSDP2 gathers them.
    WEIGHTS = auto()
    # Weights are loaded once per call of an autoencoder, not once per tile.
    VAE_OFFLOAD = auto()
    # Rows and tiles are computed after the weights are on the device.
    PARALLEL_VAE = auto()
    # CFG parallelism runs outside the cache, so that the cache sees only the CFG branches that this rank
    # computes.
    GUIDANCE = auto()
    # Around a user's callback, which GUIDANCE, CACHE and SCHEDULED_ATTENTION wrap, too. These do not depend
    # on each other, so the line does not matter.
    CHECKED_CALLBACK = auto()
    # A rank verifies the CFG branches that it computes, with everything inside that may change their result.
    VERIFIED = auto()
    # The cache identifies CFG branches from unsharded arguments, so it runs outside the plan.
    CACHE = auto()
    # Another backend of attention may change a result, so it is chosen inside the verification.
    SCHEDULED_ATTENTION = auto()
    # A step is counted before the callback of a modular pipeline (STEP_CALLBACK) sees it.
    SCHEDULER_TRACKER = auto()
    # PipeFusion decides for each call whether the stages send its output, so it runs outside of them.
    PIPEFUSION = auto()
    # Pipeline stages exchange gathered tensors, so they run outside the plan.
    STAGES = auto()
    # PipeFusion takes its patch of the inputs of a submodule before the plan shards them.
    PATCH_INPUTS = auto()
    # A call with gradients of sharded weights raises before the plan communicates.
    TENSOR_WEIGHTS = auto()
    # Alone, on the methods that add, merge and remove LoRAs of a model with sharded weights.
    LORA = auto()
    # Alone, on the methods that move or save a model in stages, or change its LoRAs: weights that are sharded
    # are refused there.
    STAGED_WEIGHTS = auto()
    # Alone, on ``merge`` of the LoRA layers of a model in stages.
    STAGED_MERGE = auto()
    # A UNet's rows are sharded where the tokens of a transformer are: inside guidance and verification.
    PARALLEL_DENOISER = auto()
    # Outside of what computes a product with other rows, so that it finds the same kernel.
    PRODUCTS = auto()
    # All ranks have the same arguments outside of the plan, so they check the same calls.
    SAME_BITS = auto()
    PLAN = auto()
    # Inside the plan, the inputs of the plan are this rank's part; tokens that a submodule shards later are
    # not yet.
    SAME_BITS_PRODUCTS = auto()
    # Attention that the plan does not name is checked with what the plan has left of the tokens.
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

    @property
    def supplies_weights(self) -> bool:
        """Whether the feature moves, gathers or shards weights, so that the model cannot be called without it.

        A verification calls the unmodified model with these slots only. Without a slot that is missing here
        it would compute with no weights, or with those of one rank. Those of pipeline stages are missing
        because no call of the unmodified model could pass them: ``para_core/verify/option.py`` refuses such a
        mesh.
        """
        return self in (
            Slot.WEIGHTS,
            Slot.VAE_OFFLOAD,
            Slot.TENSOR_WEIGHTS,
            Slot.LORA,
            Slot.STAGED_WEIGHTS,
            Slot.STAGED_MERGE,
            Slot.OFFLOADED_BLOCK,
        )
