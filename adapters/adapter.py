"""The type ``Adapter``: how one transformer class of diffusers is sharded and cached.

``adapters/models`` has a value for each supported class, and users pass their own as ``adapter=``;
``registry.py`` finds the one for a model. Only ``text`` is validated here: whether another field fits depends
on the model. Autoencoders and UNets have types of their own (``adapters/vae/families.py``,
``adapters/models/unets.py``). Tests: tests/adapters/test_transformers.py; of the blocks
tests/cache/test_pipelines.py, of the tensor plans tests/weights/test_tensor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import nn

from para_core.cache.blocks import CachedBlocks
from para_core.plans.plan import Plan
from para_core.weights.patch_plan import Frames
from para_core.weights.tensor_plan import TensorPlan

# Text tokens are sharded like image tokens, or replicated on every rank.
Text = Literal["shard", "replicate"]


@dataclass(frozen=True)
class Adapter:
    """Description of one transformer class of diffusers: how it runs in parallel, and what is cached.

    Args:
        transformer (`str`): Name of the transformer class. The adapter also applies to its subclasses.
        pipelines (`str`): Names of its pipelines as users know them, for messages.
        plan (`Plan`, *optional*): What is sharded and gathered. If text can be sharded, the plan shards it,
            as the segment ``text``. Defaults to the plan that the class publishes (``_cp_plan``).
        complete (`Callable`, *optional*): ``complete(plan, module)`` returns the plan of one module, for a
            plan that depends on the module's config.
        text (`"shard"` or `"replicate"`, defaults to `"shard"`): The faster treatment of text tokens, used by
            default.
        blocks (`CachedBlocks`, *optional*): The block stack, for First Block Cache, stages, PipeFusion,
            block offload and attention schedules with copies of a scheduler. Without it these are refused.
        uncached (`str`, *optional*): Reason why the blocks cannot be cached, for a message.
        tensor (`TensorPlan`, *optional*): What tensor parallelism shards. Defaults to the plan that the class
            publishes (``_tp_plan``).
        frames (`Frames`, *optional*): Which dim of the input holds the frames, if the model turns a video
            into tokens itself. PipeFusion then splits the input into patches of whole frames.
        empty_text (`bool`, defaults to `True`): Whether the model accepts a text without tokens. Then only
            PipeFusion's first patch carries the text; otherwise each patch carries all of it.
        fills (`tuple[str, str]`, *optional*): Name and value of an argument that marks a call which only
            stores keys and values, for the calls of all CFG branches to read. Every rank along ``batch`` runs
            such a call.
        called_outside (`tuple[str, ...]`): Names of modules in blocks that the model also calls outside of
            their block. Their weights are not sharded by FSDP2, and stages are refused.
        refused_pipelines (`dict[str, str]`): Reasons why some pipelines of the model cannot run on several
            ranks, by the name of an attribute that only these pipelines have.
        steps_with_copies (`bool`, defaults to `False`): Whether one of its pipelines steps with copies of its
            scheduler, one for each frame (diffusion forcing).
        threshold (`float`, defaults to `0.05`): Default threshold of First Block Cache.
        threshold_source (`str`, defaults to `"diffusers' FirstBlockCacheConfig"`): Source that recommends
            this threshold.

    Raises:
        ValueError: If ``text`` is unknown.
    """

    transformer: str
    pipelines: str
    plan: Plan | None = None
    complete: Callable[[Plan, nn.Module], Plan] | None = None
    text: Text = "shard"
    blocks: CachedBlocks | None = None
    uncached: str | None = None
    tensor: TensorPlan | None = None
    frames: Frames | None = None
    empty_text: bool = True
    fills: tuple[str, str] | None = None
    called_outside: tuple[str, ...] = ()
    refused_pipelines: Mapping[str, str] = field(default_factory=dict)
    steps_with_copies: bool = False
    threshold: float = 0.05
    threshold_source: str = "diffusers' FirstBlockCacheConfig"

    def __post_init__(self) -> None:
        if self.text not in get_args(Text):
            raise ValueError(f"text is {self.text!r}; expected 'shard' or 'replicate'.")
