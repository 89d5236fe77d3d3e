"""Measure this machine, and say what to change.

[torchrun --nproc_per_node=4 -m] para_core.doctor [--output doctor.json]
"""

from para_core.planner.doctor import main

if __name__ == "__main__":
    raise SystemExit(main())
