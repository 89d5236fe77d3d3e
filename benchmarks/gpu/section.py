"""One section, or one part of it, in this process:  python -m benchmarks.gpu.section NAME ...  (the runner's own way in)"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import time
import traceback
from pathlib import Path

import torch

from benchmarks.gpu.job import Job, SectionSkipped
from benchmarks.gpu.processes import use_no_network
from benchmarks.gpu.runner import END


def main() -> None:
    """Run it; whatever happens is in the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--module", required=True)
    parser.add_argument("--part", default="")
    parser.add_argument("--device", required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--end", type=float, required=True, help="time.monotonic() at which this process ends itself")
    args = parser.parse_args()
    # Where it hangs, if it does: the runner keeps the end of what is printed.
    faulthandler.dump_traceback_later(max(0.1, args.end - time.monotonic()), exit=True)
    use_no_network()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        device = torch.device(device.type, device.index or 0)
        torch.cuda.set_device(device)
    # What has begun should end, and be written, before the limit.
    job = Job(args.name, device, args.tiny, args.file, args.end - END, args.part)
    job.write("began")
    try:
        importlib.import_module(args.module).run(job)
    except SectionSkipped as reason:
        job.write("skipped", str(reason))
    except BaseException:
        job.write("failed", traceback.format_exc())
        raise
    else:
        job.write("done")


if __name__ == "__main__":
    main()
