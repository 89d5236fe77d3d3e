"""All public names of :mod:`para_core.adapters`. The package imports this module when one is first accessed.

A name is one line, so that an optional feature is removed with its lines.
"""

from para_core.adapters.adapter import Adapter as Adapter
from para_core.adapters.cache.pipeline import apply_cache_on_pipe as apply_cache_on_pipe
from para_core.adapters.cache.pipeline import apply_cache_on_transformer as apply_cache_on_transformer
from para_core.adapters.cache.pipeline import remove_cache_from_pipe as remove_cache_from_pipe
from para_core.adapters.cache.report import cache_report as cache_report
from para_core.adapters.parallel.load_sharded import from_pretrained_sharded as from_pretrained_sharded
from para_core.adapters.parallel.parallelize import parallelize_pipe as parallelize_pipe
from para_core.adapters.parallel.parallelize import unparallelize_pipe as unparallelize_pipe
from para_core.adapters.parallel.transformer import parallelize_transformer as parallelize_transformer
from para_core.adapters.parallel.transformer import unparallelize_transformer as unparallelize_transformer
from para_core.adapters.parallel.unet import parallelize_unet as parallelize_unet
from para_core.adapters.planner.plan_mesh import plan_mesh as plan_mesh
from para_core.adapters.propose.proposal import Proposal as Proposal
from para_core.adapters.propose.propose import propose_plan as propose_plan
from para_core.adapters.vae.unet import unparallelize_unet as unparallelize_unet
from para_core.adapters.vae.vae import parallelize_vae as parallelize_vae
from para_core.adapters.vae.vae import unparallelize_vae as unparallelize_vae
from para_core.adapters.weights.fused_pipe import pipefusion_report as pipefusion_report
from para_core.adapters.weights.shard import shard_weights as shard_weights
from para_core.attention.kept_keys import KeptKeys as KeptKeys
from para_core.attention.schedule import AttentionSchedule as AttentionSchedule
