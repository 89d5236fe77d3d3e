"""The public names of :mod:`para_core` that need torch. The package imports this module when one is first accessed.

Those of :mod:`para_core.adapters`, such as ``parallelize_pipe``, are in ``adapters/api.py``. ``launch``,
``Cancelled``, ``RankDied`` and ``__version__`` are public too, and imported without torch:
``para_core/__init__.py``. A name is one line, so that an optional feature is removed with its lines.
``tests/lift_out.py`` and ``docs/site/hooks.py`` read these lines without importing them, so nothing but
``from … import name as name`` stands here. Tests: tests/test_lift_out.py, tests/cli/test_help.py.
"""

from para_core.attention.backends.flash3 import flash_attention_3 as flash_attention_3
from para_core.attention.backends.flash4 import flash_attention_4 as flash_attention_4
from para_core.attention.backends.sage import sage_attention as sage_attention
from para_core.cache.apply import apply_cache as apply_cache
from para_core.cache.apply import cache_context as cache_context
from para_core.cache.apply import remove_cache as remove_cache
from para_core.cache.apply import reset_cache as reset_cache
from para_core.cache.blocks import BlockGroup as BlockGroup
from para_core.cache.blocks import CachedBlocks as CachedBlocks
from para_core.cache.decision import Verdict as Verdict
from para_core.cache.forecast_rule import Forecast as Forecast
from para_core.cache.options import CacheOptions as CacheOptions
from para_core.cache.report import CacheReport as CacheReport
from para_core.cache.report import model_cache_report as model_cache_report
from para_core.cache.rules import Observation as Observation
from para_core.cache.rules import Rule as Rule
from para_core.comparison.difference import Difference as Difference
from para_core.distributed.create_mesh import init_context_parallel_mesh as init_context_parallel_mesh
from para_core.layout.sequence import Segment as Segment
from para_core.layout.sequence import SequenceLayout as SequenceLayout
from para_core.modes.batch_parallel import BatchParallelAttnMode as BatchParallelAttnMode
from para_core.modes.block_sparse import BlockSparseAttnMode as BlockSparseAttnMode
from para_core.modes.functional import ring_attention as ring_attention
from para_core.modes.functional import ulysses_attention as ulysses_attention
from para_core.modes.functional import unified_attention as unified_attention
from para_core.modes.kept_keys import SparseKVAttnMode as SparseKVAttnMode
from para_core.modes.unified import RingAttnMode as RingAttnMode
from para_core.modes.unified import UlyssesAttnMode as UlyssesAttnMode
from para_core.modes.unified import UnifiedAttnMode as UnifiedAttnMode
from para_core.plans.context_parallel import ContextParallelConfig as ContextParallelConfig
from para_core.plans.context_parallel import ParallelConfig as ParallelConfig
from para_core.plans.context_parallel import apply_context_parallel as apply_context_parallel
from para_core.plans.context_parallel import remove_context_parallel as remove_context_parallel
from para_core.plans.plan import Attention as Attention
from para_core.plans.plan import AttentionByHeads as AttentionByHeads
from para_core.plans.plan import Count as Count
from para_core.plans.plan import CumulativeLengths as CumulativeLengths
from para_core.plans.plan import FirstTokens as FirstTokens
from para_core.plans.plan import Gather as Gather
from para_core.plans.plan import Halo as Halo
from para_core.plans.plan import LastTokens as LastTokens
from para_core.plans.plan import LinearAttention as LinearAttention
from para_core.plans.plan import OneForEach as OneForEach
from para_core.plans.plan import Plan as Plan
from para_core.plans.plan import Replicate as Replicate
from para_core.plans.plan import Split as Split
from para_core.plans.plan import SplitMask as SplitMask
from para_core.user_warnings import CacheWarning as CacheWarning
from para_core.user_warnings import ForeignCodeWarning as ForeignCodeWarning
from para_core.user_warnings import ParaCoreWarning as ParaCoreWarning
from para_core.user_warnings import ParallelWarning as ParallelWarning
from para_core.verify.check import check_parallel as check_parallel
from para_core.verify.check_result import CheckedCase as CheckedCase
from para_core.verify.check_result import ParallelCheck as ParallelCheck
from para_core.weights.pipefusion_options import PipeFusion as PipeFusion
from para_core.weights.pipefusion_options import PipeFusionReport as PipeFusionReport
