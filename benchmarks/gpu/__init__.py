"""What only a GPU can tell:  make gpu-check  (docs/gpu_check.md). One file per section; each runs in a process of its own."""
