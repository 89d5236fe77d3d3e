"""Tables of published seconds, with one and with several devices, for benchmarks/planner/published.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from para_core.adapters.planner.mesh import MeshShape

XDIT_FLUX = "https://github.com/xdit-project/xDiT/blob/main/docs/performance/flux.md"
XDIT_HUNYUAN = "https://github.com/xdit-project/xDiT/blob/main/docs/performance/hunyuanvideo.md"
DIFFUSERS_PAGE = "https://huggingface.co/docs/diffusers/main/training/distributed_inference"
CACHE_DIT = "https://github.com/vipshop/cache-dit/issues/704"
NVL72 = (
    "https://github.com/NVIDIA/TensorRT-LLM/blob/main/docs/source/blogs/tech_blog/"
    "blog25_Scaling_Video_Generation_Across_NVL72_Rack_with_TensorRT-LLM.md"
)
SGLANG = "https://docs.sglang.io/docs/sglang-diffusion/ring_sp_performance.md"
SGLANG_TESTS = (
    "https://github.com/sgl-project/sglang/blob/main/python/sglang/multimodal_gen/test/server/perf_baselines/h100.json"
)
XDIT_CONSISID = "https://github.com/xdit-project/xDiT/blob/main/docs/performance/consisid.md"
XDIT_SANA = "https://github.com/xdit-project/xDiT/blob/main/docs/performance/sana.md"


@dataclass(frozen=True)
class Published:
    """A published table.

    Args:
        source: address of the page, empty if the figure was passed on without one.
        alone: seconds of one device, on which the table is fitted, or None if they were not published. ``fitted_on``
            says where they come from, if not from this table.
        rows: seconds by mesh.
        sizes: differences from the published generation of the model.
        denoising_alone: whether the seconds have only ``vae`` and ``tail`` of text encoder and autoencoder: the time of
            one device to decode, which at most 8 ranks share, and the rest.
    """

    name: str
    source: str
    model: str
    device: str
    compiled: bool
    alone: float | None
    rows: tuple[tuple[MeshShape, float], ...]
    sizes: tuple[tuple[str, int], ...] = ()
    link: str | None = None
    denoising_alone: bool = False
    vae: float = 0.0
    tail: float = 0.0
    fitted_on: str = "its own row of one device"
    assumed: str = ""
    later: bool = False


def ulysses(*rows: tuple[int, float]) -> tuple[tuple[MeshShape, float], ...]:
    return tuple((MeshShape(ulysses=ranks), seconds) for ranks, seconds in rows)


# The meshes are (ring, ulysses).
_FLUX_MESHES = ((1, 2), (2, 1), (2, 2), (1, 4), (4, 1))


def xdit_flux(name: str, alone: float, *seconds: float) -> Published:
    shapes = [MeshShape(ring=mesh[0], ulysses=mesh[1]) for mesh in _FLUX_MESHES]
    rows = tuple(zip(shapes, seconds, strict=True))
    return Published(f"xDiT, FLUX.1, {name}", XDIT_FLUX, "FLUX.1-dev", "H100", name == "compiled", alone, rows)


def xdit_hunyuan(size: str, device: str, alone: float, *rows: tuple[int, float]) -> Published:
    sizes = (("height", 960), ("width", 960)) if size == "960 × 960" else ()
    name = f"xDiT, HunyuanVideo {size}, {device}"
    return Published(name, XDIT_HUNYUAN, "HunyuanVideo", device, False, alone, ulysses(*rows), sizes)


def sglang_tests(name: str, model: str, alone: float, shape: MeshShape, seconds: float, **options: Any) -> Published:
    """Return a row of SGLang's own tests on H100s: the slowest of several runs plus 5 %, from its file of limits."""
    table = f"SGLang 0.5.23, {name}"
    return Published(table, SGLANG_TESTS, model, "H100", False, alone, ((shape, seconds),), later=True, **options)


_WAN_5B = (("height", 480), ("width", 832), ("frames", 81), ("steps", 50))
_TENSORRT_WAN = partial(
    Published,
    source=NVL72,
    model="Wan 2.2 A14B",
    device="GB200",
    compiled=True,
    sizes=(("frames", 80), ("steps", 40)),
    denoising_alone=True,
)
_SGLANG_WAN = partial(
    Published,
    source=SGLANG,
    model="Wan 2.2 TI2V 5B",
    device="RTX 4090",
    compiled=False,
    sizes=_WAN_5B,
    denoising_alone=True,
)
TABLES = (
    xdit_flux("compiled", 4.30, 2.68, 2.60, 1.80, 1.63, 1.98),
    xdit_flux("eager", 6.71, 4.38, 5.31, 5.19, 4.24, 5.11),
    xdit_hunyuan("1280 × 720", "H100", 1904.08, (2, 925.04), (4, 514.08), (8, 337.58)),
    xdit_hunyuan("1280 × 720", "H20", 6639.17, (2, 3400.55), (4, 1762.86), (8, 940.97)),
    xdit_hunyuan("1280 × 720", "L20", 6043.88, (2, 3271.44), (4, 2080.05)),
    xdit_hunyuan("960 × 960", "H100", 1735.01, (2, 934.09), (3, 645.45), (6, 367.02)),
    xdit_hunyuan("960 × 960", "H20", 6621.46, (2, 3400.55), (3, 2310.48), (6, 1214.67)),
    xdit_hunyuan("960 × 960", "L20", 6039.08, (2, 3260.62), (3, 2284.74)),
    Published(
        "diffusers, FLUX.1, 50 steps",
        DIFFUSERS_PAGE,
        "FLUX.1-dev",
        "H100",
        False,
        9.30,
        (
            (MeshShape(ulysses=4), 6.671),
            (MeshShape(ring=2, ulysses=2), 11.069),
            (MeshShape(ring=4), 13.076),
        ),
        (("steps", 50),),
        fitted_on="cache-dit's row of one H100, the same code; this table has none",
    ),
    Published(
        "cache-dit, FLUX.1, 50 steps",
        CACHE_DIT,
        "FLUX.1-dev",
        "H100",
        False,
        9.30,
        ulysses((2, 6.04)),
        (("steps", 50),),
    ),
    _TENSORRT_WAN(
        "TensorRT-LLM, Wan 2.2 A14B, denoising",
        alone=342.04,
        rows=(
            (MeshShape(batch=2), 179.96),
            (MeshShape(batch=2, ring=9, ulysses=4, ring_method="2d"), 7.04),
            (MeshShape(ring=9, ulysses=8, ring_method="2d"), 7.57),
            (MeshShape(batch=2, ring=9, ulysses=4), 12.88),
        ),
    ),
    _TENSORRT_WAN(
        "TensorRT-LLM, Wan 2.2 A14B, end to end",
        alone=346.16,
        rows=((MeshShape(batch=2, ring=9, ulysses=4, ring_method="2d"), 9.20),),
        vae=2.72,
        tail=346.16 - 342.04 - 2.72,
        fitted_on="one GB200; 373.35 s are of one B200",
    ),
    _SGLANG_WAN(
        "SGLang, Wan 2.2 TI2V 5B, end to end",
        alone=90.63,
        rows=((MeshShape(ring=2), 63.74),),
        vae=13.43,
        tail=90.63 - 71.68 - 13.43,
    ),
    _SGLANG_WAN("SGLang, Wan 2.2 TI2V 5B, denoising", alone=71.68, rows=((MeshShape(ring=2), 52.64),)),
    sglang_tests(
        "FLUX.1",
        "FLUX.1-dev",
        6.693,
        MeshShape(ulysses=2),
        4.244,
        sizes=(("steps", 50),),
        assumed="Ulysses, eager",
    ),
    sglang_tests(
        "Qwen-Image",
        "Qwen-Image",
        12.770,
        MeshShape(ring=2),
        10.192,
        sizes=(("height", 1024), ("width", 1024)),
        assumed="eager",
    ),
    sglang_tests("FLUX.2", "FLUX.2-dev", 23.140, MeshShape(tensor=2), 13.216, assumed="eager"),
    # One second at 24 frames per second is the server's default. The autoencoder makes 6 latent frames of it.
    sglang_tests(
        "Wan 2.1 1.3B",
        "Wan 2.1 1.3B",
        8.107,
        MeshShape(batch=2),
        4.436,
        sizes=(("frames", 21),),
        assumed="eager, 832 × 480 × 21",
    ),
    Published(
        "xDiT 0.7.0, ConsisID",
        XDIT_CONSISID,
        "CogVideoX-5B",
        "H100",
        False,
        114.87,
        (
            (MeshShape(batch=2), 59.72),
            (MeshShape(ulysses=2), 76.56),
            (MeshShape(ring=2), 70.19),
            (MeshShape(ulysses=3), 53.57),
            (MeshShape(ring=3), 55.51),
            (MeshShape(batch=2, ulysses=2), 41.37),
            (MeshShape(batch=2, ring=2), 40.68),
            (MeshShape(ring=3, ulysses=2), 44.89),
            (MeshShape(ring=2, ulysses=3), 44.24),
            (MeshShape(batch=2, ulysses=3), 38.35),
            (MeshShape(batch=2, ring=3), 35.78),
        ),
        assumed="eager; the transformer of CogVideoX-5B, from which ConsisID was fine-tuned, without the face encoder",
        later=True,
    ),
    Published(
        "SGLang, Wan 2.2 A14B 1280 × 720 × 81, 27 steps, SageAttention, compiled",
        "",
        "Wan 2.2 A14B",
        "H100",
        True,
        None,
        ((MeshShape(batch=2, ulysses=4), 94.2),),
        (("steps", 27),),
        fitted_on="nothing: seconds of one device are not published",
        assumed="batch 2, ulysses 4; attention at the speed of 16 bits",
        later=True,
    ),
)

# These published tables are not predicted. The values give the reason.
NOT_PREDICTED = {
    f"[xDiT 0.7.0, SANA 4096 × 4096, A100]({XDIT_SANA})": "linear attention, which the planner does not count",
    "vLLM-Omni, Cosmos 3 Nano": "size, frames and steps are not published",
    "vLLM-Omni, HunyuanVideo 1.5, B300": "size, frames and steps are not published",
    "vLLM-Omni, Wan 2.2 I2V 832 × 480": "device, frames and steps are not published",
}
