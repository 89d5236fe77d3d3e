"""All benchmarks, one after the other:  python -m benchmarks"""

from pathlib import Path

from benchmarks.launch import launch

launch("benchmarks.demo", 1, "--record", "--output", str(Path("docs/demo.png")))
launch("benchmarks.cache.images", 1, "--record", "--folder", "docs")
launch("benchmarks.pipelines.speed", 1)
launch("benchmarks.attention.large_worlds", 1)
launch("benchmarks.attention.eight_bits", 1)
launch("benchmarks.attention.low_precision", 1)
launch("benchmarks.pipelines.generation", 1)
launch("benchmarks.pipelines.hooks", 1)
launch("benchmarks.planner.propose", 1)
launch("benchmarks.pipelines.generation", 1, "--dtype", "bfloat16")
launch("benchmarks.planner.traffic", 1)
launch("benchmarks.planner.published", 1)
launch("benchmarks.planner.weights", 1)
launch("benchmarks.pipelines.weights", 1)
launch("benchmarks.pipelines.stages", 1)
launch("benchmarks.pipelines.pipefusion", 1)
launch("benchmarks.pipelines.beside_diffusers", 1)
launch("benchmarks.cache.forecasts", 1)
launch("zoo.video.caches", 1)
launch("benchmarks.attention.compiled", 1)
