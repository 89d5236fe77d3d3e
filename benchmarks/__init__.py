"""Programs that measure. Each prints a table or writes JSON to benchmarks/results; ``python -m benchmarks.pages``
writes the pages from it.

- attention: one GPU against PyTorch's kernels; the host's cost on a mesh; low precision.
- pipelines: exactness against one device; speed; autoencoders; stages.
- cache, planner, serving, peers (other libraries), faults (several hosts, and what breaks), demo.
- gpu: ``make gpu-check``.
"""
