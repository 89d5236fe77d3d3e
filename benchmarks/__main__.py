"""Run the benchmarks that need no GPU, no root and no second server, one after the other, and write the pages.

python -m benchmarks
"""

from benchmarks.harness import launch

PROGRAMS = (
    ("demo", "--output", "docs/images/demo.png"),
    ("demo.gallery",),
    ("attention.mesh",),
    ("attention.large_worlds",),
    ("attention.low_precision",),
    ("cache.images", "--folder", "docs/images"),
    ("cache.quality",),
    ("cache.forecasts",),
    ("pipelines.beside_diffusers",),
    ("pipelines.exactness",),
    ("pipelines.stages",),
    ("pipelines.lossy",),
    ("planner.traffic",),
    ("planner.counts",),
    ("planner.published",),
    ("planner.sizes",),
    ("planner.propose",),
    ("demo.chart",),
    ("one_process",),
    ("walks",),
    ("notebook",),
    ("pages",),
)

if __name__ == "__main__":
    for program, *arguments in PROGRAMS:
        launch(f"benchmarks.{program}", 1, *arguments)
