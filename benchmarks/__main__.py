"""All benchmarks, one after the other:  python -m benchmarks"""

from pathlib import Path

from benchmarks.launch import launch

launch("benchmarks.demo", 1, "--record", "--output", str(Path("docs/demo.png")))
launch("benchmarks.cache_images", 1, "--record", "--folder", "docs")
launch("benchmarks.parallel_speed", 1)
launch("benchmarks.far_worlds", 1)
launch("benchmarks.eight_bits", 1)
launch("benchmarks.int8_attention", 1)
launch("benchmarks.pipelines", 1)
launch("benchmarks.hooks", 1)
launch("benchmarks.propose", 1)
launch("benchmarks.pipelines", 1, "--dtype", "bfloat16")
launch("benchmarks.real_sizes", 1)
launch("benchmarks.planner_check", 1)
launch("benchmarks.weights_memory", 1)
launch("benchmarks.weights_table", 1)
launch("benchmarks.stages", 1)
launch("benchmarks.pipefusion_quality", 1)
launch("benchmarks.beside_diffusers", 1)
launch("benchmarks.cache_forecasts", 1)
launch("benchmarks.tiny_video.caches", 1)
launch("benchmarks.kernel_resources", 1)
