"""All public names of :mod:`para_core.adapters`. The package imports this module when one is first accessed."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.cache.calibration.calibrate import calibrate_cache
from para_core.adapters.cache.calibration.result import Calibration, CalibrationRow
from para_core.adapters.cache.pipeline import (
    apply_cache_on_pipe,
    apply_cache_on_transformer,
    cache_report,
    remove_cache_from_pipe,
)
from para_core.adapters.parallel.load_sharded import from_pretrained_sharded
from para_core.adapters.parallel.options import parallelize_transformer, parallelize_unet, unparallelize_transformer
from para_core.adapters.parallel.parallelize import parallelize_pipe, unparallelize_pipe
from para_core.adapters.planner.plan_mesh import plan_mesh
from para_core.adapters.propose.proposal import Proposal
from para_core.adapters.propose.propose import propose_plan
from para_core.adapters.vae.unet import unparallelize_unet
from para_core.adapters.vae.vae import parallelize_vae, unparallelize_vae
from para_core.adapters.weights.fused_pipe import pipefusion_report
from para_core.adapters.weights.shard import shard_weights
from para_core.attention.schedule import AttentionSchedule, KeptKeys

__all__ = [
    "Adapter",
    "AttentionSchedule",
    "Calibration",
    "CalibrationRow",
    "KeptKeys",
    "Proposal",
    "apply_cache_on_pipe",
    "apply_cache_on_transformer",
    "cache_report",
    "calibrate_cache",
    "from_pretrained_sharded",
    "parallelize_pipe",
    "parallelize_transformer",
    "parallelize_unet",
    "parallelize_vae",
    "pipefusion_report",
    "plan_mesh",
    "propose_plan",
    "remove_cache_from_pipe",
    "shard_weights",
    "unparallelize_pipe",
    "unparallelize_transformer",
    "unparallelize_unet",
    "unparallelize_vae",
]
