"""Measure this machine, and say what to change.

Run it as ``python -m para_core.doctor``, or on several ranks as
``torchrun --nproc_per_node=4 -m para_core.doctor``. The option ``--output doctor.json`` writes the results to a file.
"""

from para_core.planner.doctor import main

if __name__ == "__main__":
    raise SystemExit(main())
