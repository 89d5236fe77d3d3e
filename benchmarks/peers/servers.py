"""The callers of two servers of diffusion models, SGLang and vLLM-Omni. They call the attention layers without the
server.

The packages for servers and GPUs that they import are not installed. ``stand_ins.for_packages`` has placeholders for
them.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from benchmarks.peers import stand_ins as kernels
from benchmarks.peers.rows import Call, Cut, RankOutput, Row, Setting, mask_forms


def _tokens(call: Call, cut: Cut) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Return query, key and value, the positions of queries and keys, and the queries that are not padding."""
    if "skip_sequence_parallel" in call.setting:  # Each rank has all keys of the text.
        shard, cut = cut, lambda x: x if x.shape[2] == call.row.S_k else shard(x)
    leaves, (positions, key_positions) = call.tokens(cut), call.positions(lambda x: cut(x + 1) - 1)
    return leaves, positions, key_positions[key_positions >= 0], positions >= 0


def _cross_first(row: Row, settings: list[Setting]) -> list[Setting]:
    """Return ``settings`` after that of cross-attention, in which both servers replicate the text."""
    return [{"skip_sequence_parallel": True}, *settings] if row.S_k is not None else settings


# -- SGLang: ``USPAttention``, with tokens sharded and padded by ``sp_shard_utils``, as its Wan does inline.


def prepare_sglang(*, stand_ins: bool) -> None:
    """Import SGLang before ranks are forked."""
    from transformers.utils import is_compressed_tensors_available, is_torchvision_available

    # Ask before there are placeholders, because transformers remembers the answers.
    is_torchvision_available()
    is_compressed_tensors_available()
    kernels.for_packages("sglang", ("IPython", "compressed_tensors", "torchvision", "tvm_ffi"))
    from sglang.multimodal_gen.runtime.layers.attention import layer  # noqa: F401
    from sglang.multimodal_gen.runtime.layers.attention.backends import flash_attn

    if stand_ins:
        flash_attn.flash_attn_varlen_func = kernels._flash_attn_varlen_func


def settings_sglang(row: Row, ring: int, ulysses: int, *, stand_ins: bool) -> list[Setting]:
    """Return the call as its Wan makes it, then with the options of its other models."""
    backend = {"backend": "FA"} if ring > 1 and stand_ins else {}
    settings: list[Setting] = [{**backend}]
    if row.S % (ring * ulysses) and row.mask is None:
        settings.append({**backend, "tail_attn_meta": True, "by hand": "with `tail_attn_meta`"})
    if ring == 1:
        settings.append({"kv_gather_degree": True, "by hand": "with `kv_gather_degree`"})
    return _cross_first(row, settings)


def attend_sglang(call: Call) -> RankOutput:
    """Run one call with layout ``[B, S, H, D]``."""
    from sglang.multimodal_gen.runtime.distributed.sp_shard_utils import build_shard_plan, shard_seq, tail_attn_meta
    from sglang.multimodal_gen.runtime.layers.attention.layer import USPAttention
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    row, setting = call.row, call.setting
    _set_up_sglang(call)
    leaves, positions, key_positions, valid = _tokens(call, lambda x: shard_seq(x, dim=2)[0])
    attention = USPAttention(
        num_heads=row.H,
        head_size=row.D,
        num_kv_heads=row.H_kv,
        causal=row.is_causal,
        skip_sequence_parallel="skip_sequence_parallel" in setting,
    )
    options: dict[str, Any] = {"num_replicated_prefix": row.text if row.text_whole else 0}
    if "tail_attn_meta" in setting:
        options["attn_mask_meta"] = tail_attn_meta(build_shard_plan(row.S), row.B, torch.device("cpu"))
    mask = row.whole_mask()
    if row.mask in ("full", "hidden"):
        mask = mask[None, None]  # SGLang reads a mask of two dims as [B, S_local].
    elif row.mask in ("padding", "text padding"):  # The mask is [B, S_local], padded with False.
        mask = call.cut_segments(mask.mT, lambda x: shard_seq(x, dim=2)[0])[:, 0, :, 0]

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, **options).transpose(1, 2)

    with set_forward_context(0, None):
        out = call.compiled(run)(*leaves, mask)
        return call.finish(out[:, :, valid], leaves, positions[valid], key_positions)


def _set_up_sglang(call: Call) -> None:
    """Set the arguments of its server, and its process groups."""
    from sglang.multimodal_gen.runtime import server_args
    from sglang.multimodal_gen.runtime.distributed import parallel_state
    from sglang.multimodal_gen.runtime.platforms import current_platform

    rank, world = dist.get_rank(), dist.get_world_size()
    arguments = {
        "attention_backend": None,
        "kv_gather_degree": world if "kv_gather_degree" in call.setting else 1,
        "sp_split_auto": False,
        "enable_attention_backend_autotune": False,
    }
    server_args.set_global_server_args(SimpleNamespace(**arguments))
    parallel_state.init_distributed_environment(world, rank, local_rank=rank, backend="gloo")
    degrees = {"sequence_parallel_degree": world, "ulysses_degree": call.ulysses, "ring_degree": call.ring}
    parallel_state.initialize_model_parallel(**degrees, backend="gloo")
    if "backend" in call.setting:  # SGLang selects this for CUDA. On CPUs it has only PyTorch's SDPA.
        path = "sglang.multimodal_gen.runtime.layers.attention.backends.flash_attn.FlashAttentionBackend"
        type(current_platform).get_attn_backend_cls_str = lambda *args, **options: path


def frames() -> dict[str, Any]:
    """Return how many of 81 frames SGLang computes, for a family that shards frames and one that shards tokens."""
    from sglang.multimodal_gen.configs.pipeline_configs.hunyuan import HunyuanConfig
    from sglang.multimodal_gen.configs.pipeline_configs.wan import WanT2V480PConfig
    from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams

    facts: dict[str, Any] = {}
    for config in (HunyuanConfig(), WanT2V480PConfig()):
        by_gpus = facts[f"frames made of 81, {type(config).__name__}"] = {}
        for gpus in (1, 2, 3, 4, 8):
            params = SamplingParams(num_frames=81, height=480, width=832)
            arguments = SimpleNamespace(pipeline_config=config, num_gpus=gpus, comfyui_mode=True)
            params._adjust_visual_fields(arguments, config)
            by_gpus[str(gpus)] = params.num_frames
    return facts


# -- vLLM-Omni: its layer ``Attention``, with tokens sharded by the hook of its sequence-parallel plans.


def prepare_vllm_omni(*, stand_ins: bool) -> None:
    """Import vLLM-Omni before ranks are forked."""
    kernels.for_packages("vllm_omni", ("vllm",))
    import_module("vllm.model_executor.layers.quantization").QUANTIZATION_METHODS = []  # It is a list in vLLM.
    from vllm_omni import platforms
    from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

    class CpuPlatform(OmniPlatform):
        """A platform like a GPU with PyTorch's SDPA alone, because vLLM-Omni has no attention on CPUs."""

        _omni_enum = OmniPlatformEnum.CUDA
        device_type = device_name = "cpu"

        @classmethod
        def get_diffusion_attn_backend_cls(cls, *args: Any, **options: Any) -> str:
            return "vllm_omni.diffusion.attention.backends.sdpa.SDPABackend"

        @classmethod
        def get_device_count(cls) -> int:
            return 1

        @classmethod
        def get_torch_device(cls, *args: Any) -> torch.device:
            return torch.device("cpu")

    platforms._current_omni_platform = CpuPlatform()
    from vllm_omni.diffusion.attention import layer  # noqa: F401
    from vllm_omni.diffusion.hooks import sequence_parallel  # noqa: F401

    if stand_ins:
        kernels.for_aten()


def settings_vllm_omni(row: Row, ring: int, ulysses: int, *, stand_ins: bool) -> list[Setting]:
    """Return the defaults with all forms of a mask, then the options for sizes that do not divide."""
    settings = mask_forms(row, ulysses)
    first = settings[0]
    if row.S % (ring * ulysses) and row.mask is None:
        settings.append({"mask_sp_padding": True, "by hand": "with `mask_sp_padding`"})
    if row.S % (ring * ulysses) or row.H % ulysses or (row.H_kv or row.H) % ulysses:
        settings.append({**first, "ulysses_mode": "advanced_uaa", "by hand": "with `advanced_uaa`"})
    if ring == 1:
        settings.append({**first, "allgather_degree": True, "by hand": "with `allgather_degree`"})
    return _cross_first(row, settings)


def attend_vllm_omni(call: Call) -> RankOutput:
    """Run one call with layout ``[B, S, H, D]``."""
    from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
    from vllm_omni.diffusion.attention.layer import Attention
    from vllm_omni.diffusion.config import set_current_diffusion_config
    from vllm_omni.diffusion.distributed.sp_plan import SequenceParallelInput
    from vllm_omni.diffusion.forward_context import create_forward_context, override_forward_context
    from vllm_omni.diffusion.hooks.sequence_parallel import SequenceParallelSplitHook

    row, setting = call.row, call.setting
    config = _set_up_vllm_omni(call)
    context = create_forward_context(omni_diffusion_config=config)
    with set_current_diffusion_config(config), override_forward_context(context):
        hook = SequenceParallelSplitHook({}, config.parallel_config)
        # This is the plan of its Wan, Flux.2 and Qwen.
        plan = SequenceParallelInput(split_dim=2, auto_pad="ulysses_mode" not in setting)
        leaves, positions, key_positions, valid = _tokens(call, lambda x: hook._prepare_sp_input(x, plan))
        attention = Attention(
            num_heads=row.H,
            head_size=row.D,
            causal=row.is_causal,
            softmax_scale=row.D**-0.5,
            num_kv_heads=row.H_kv,
            skip_sequence_parallel="skip_sequence_parallel" in setting,
        )
        mask = _mask_vllm_omni(call, positions[valid], key_positions)

        def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            if not row.text_whole:
                return attention(q, k, v, AttentionMetadata(attn_mask=mask)).transpose(1, 2)
            text, image = zip(*(x.split([row.text, x.shape[1] - row.text], dim=1) for x in (q, k, v)), strict=True)
            joint = dict(zip(("joint_query", "joint_key", "joint_value"), text, strict=True))
            return attention(*image, AttentionMetadata(joint_attn_mask=mask, **joint)).transpose(1, 2)

        out = call.compiled(run)(*leaves, mask)
        return call.finish(out[:, :, valid], leaves, positions[valid], key_positions)


def _mask_vllm_omni(call: Call, positions: Tensor, key_positions: Tensor) -> Tensor | None:
    """Return a mask of keys as ``[B, S]`` with the padding, the mask of the padding alone, or another mask in its
    form.
    """
    row, world = call.row, dist.get_world_size()
    if "mask_sp_padding" in call.setting:
        return F.pad(torch.ones(row.B, row.S, dtype=torch.bool), (0, -row.S % world))
    if row.mask == "text padding":
        return row.whole_mask()[:, 0, 0, : row.text]
    mask = call.mask(positions, key_positions)
    if row.mask != "padding" or call.setting["mask"] == "rows":
        return mask
    mask = mask[:, 0, 0]
    return F.pad(mask, (0, -row.S % world)) if mask.shape[1] == row.S else mask


def _set_up_vllm_omni(call: Call) -> SimpleNamespace:
    """Set its process group, and return the part of its configuration that attention reads."""
    from vllm_omni.diffusion.distributed import parallel_state
    from vllm_omni.diffusion.distributed.group_coordinator import SequenceParallelGroupCoordinator

    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (call.ring, call.ulysses), mesh_dim_names=("ring", "ulysses"))
    groups = {f"{name}_group": mesh.get_group(name) for name in ("ulysses", "ring")}
    parallel_state._SP = SequenceParallelGroupCoordinator(
        [list(range(world))], rank, "gloo", **groups, allgather_group=dist.group.WORLD
    )
    gather = "allgather_degree" in call.setting
    parallel = {
        "ulysses_degree": 1 if gather else call.ulysses,
        "ring_degree": call.ring,
        "allgather_degree": world if gather else 1,
        "sequence_parallel_size": world,
        "ulysses_mode": call.setting.get("ulysses_mode", "strict"),
        "mask_sp_padding": "mask_sp_padding" in call.setting,
    }
    config = {"diffusion_attention_config": None, "model_class_name": None, "diffusion_kv_cache_dtype": None}
    return SimpleNamespace(parallel_config=SimpleNamespace(**parallel), **config)
