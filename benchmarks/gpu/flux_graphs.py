"""FLUX.1-dev's transformer as one compiled graph, and with CUDA graphs, which take the host out of a step.

A cache and CUDA graphs do not combine: the cache's state would be outputs of a graph, which its next run overwrites.
"""

from __future__ import annotations

from benchmarks.gpu.flux import FULL, TINY, Variant, measure_variants, parallel, plain, variant_name
from benchmarks.gpu.job import SectionJob

VARIANTS: tuple[Variant, ...] = ((plain, "eager"), (parallel, "one graph"), (parallel, "reduce-overhead"))
# The compilation of the whole transformer is published as 67 s on one H100, and may take half as long again.
NEEDS = {"the model": 15.0, "plain, eager": 6.0, **{variant_name(variant): 110.0 for variant in VARIANTS[1:]}}


def run(job: SectionJob) -> None:
    # A CPU has no CUDA graphs.
    variants = VARIANTS[:-1] if job.compile_backend != "inductor" else VARIANTS
    measure_variants(job, TINY if job.tiny else FULL, variants, NEEDS)
