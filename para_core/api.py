"""All public names of :mod:`para_core`. The package imports this module when a public name is first accessed."""

from para_core.attention.libraries import flash_attention_3, flash_attention_4, sage_attention
from para_core.cache.apply import apply_cache, cache_context, model_cache_report, remove_cache, reset_cache
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.cache.decision import Verdict
from para_core.cache.forecasts import Forecast
from para_core.cache.options import CacheOptions, Observation, Rule
from para_core.cache.report import CacheReport
from para_core.distributed.create_mesh import init_context_parallel_mesh
from para_core.distributed.layout import Segment, SequenceLayout
from para_core.modes.batch_parallel import BatchParallelAttnMode
from para_core.modes.functional import ring_attention, ulysses_attention, unified_attention
from para_core.modes.unified import (
    BlockSparseAttnMode,
    RingAttnMode,
    SparseKVAttnMode,
    UlyssesAttnMode,
    UnifiedAttnMode,
)
from para_core.plans.context_parallel import (
    ContextParallelConfig,
    ParallelConfig,
    apply_context_parallel,
    remove_context_parallel,
)
from para_core.plans.plan import (
    Attention,
    AttentionByHeads,
    Count,
    CumulativeLengths,
    FirstTokens,
    Gather,
    Halo,
    LastTokens,
    LinearAttention,
    OneForEach,
    Plan,
    Replicate,
    Split,
    SplitMask,
)
from para_core.user_warnings import CacheWarning, ForeignCodeWarning, ParaCoreWarning, ParallelWarning
from para_core.verify.check import CheckedCase, ParallelCheck, check_parallel
from para_core.verify.first_difference import Difference
from para_core.weights.pipefusion_options import PipeFusion, PipeFusionReport

__all__ = [
    "Attention",
    "AttentionByHeads",
    "BatchParallelAttnMode",
    "BlockGroup",
    "BlockSparseAttnMode",
    "CacheOptions",
    "CacheReport",
    "CacheWarning",
    "CachedBlocks",
    "CheckedCase",
    "ContextParallelConfig",
    "Count",
    "CumulativeLengths",
    "Difference",
    "FirstTokens",
    "Forecast",
    "ForeignCodeWarning",
    "Gather",
    "Halo",
    "LastTokens",
    "LinearAttention",
    "Observation",
    "OneForEach",
    "ParaCoreWarning",
    "ParallelCheck",
    "ParallelConfig",
    "ParallelWarning",
    "PipeFusion",
    "PipeFusionReport",
    "Plan",
    "Replicate",
    "RingAttnMode",
    "Rule",
    "Segment",
    "SequenceLayout",
    "SparseKVAttnMode",
    "Split",
    "SplitMask",
    "UlyssesAttnMode",
    "UnifiedAttnMode",
    "Verdict",
    "apply_cache",
    "apply_context_parallel",
    "cache_context",
    "check_parallel",
    "flash_attention_3",
    "flash_attention_4",
    "init_context_parallel_mesh",
    "model_cache_report",
    "remove_cache",
    "remove_context_parallel",
    "reset_cache",
    "ring_attention",
    "sage_attention",
    "ulysses_attention",
    "unified_attention",
]
