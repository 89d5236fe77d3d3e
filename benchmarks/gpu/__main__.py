"""Check on a CUDA device what the tests on CPUs cannot:  make gpu-check  or  python -m benchmarks.gpu

Sections run one after the other, the most important first, each in its own process with a time limit:

  round 1  blocks, kernels, vae    Does it run, and is it exact?
           speed                   How long do an attention call and a step take, next to PyTorch's own kernels?
           host                    Does the GPU wait for the host? How many launches and waits are there?
  round 2  flux, attention         FLUX.1 at its real size, and the attention kernel at two sizes.
  round 3  all others              Each attention backend, pipelines on several ranks, NCCL, and more.

Each section writes benchmarks/results/gpu_check/<section>.json row by row, and stops no other. Exit code 0: all
sections ended well or were skipped with a reason; 1: a number is wrong; 2: there is no GPU; 3: something failed or was
killed, and no number is wrong. See docs/install.md.
"""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path

import torch

from benchmarks.gpu.runner import ALL, SECTIONS, Options, exit_code, run_all
from benchmarks.harness import RESULTS, parser_of


def main(arguments: list[str] | None = None) -> int:
    """Run the requested sections, and return the exit code."""
    names = [section.name for section in SECTIONS]
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda", help="cpu: with --tiny, to see that the pieces run")
    parser.add_argument("--tiny", action="store_true", help="sizes that take a moment on a CPU")
    parser.add_argument("--sections", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--minutes", type=float, default=ALL / 60, help="for all sections together")
    parser.add_argument("--resume", action="store_true", help="keep what is finished in --output, run the rest")
    parser.add_argument("--compile-backend", help="of torch.compile; defaults to inductor, and with --tiny to eager")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_check", help="folder for the JSON files")
    args = parser.parse_args(arguments)
    sections = tuple(section for section in SECTIONS if section.name in args.sections)
    least = min(section.first for section in sections) / 60
    if not args.minutes >= least:
        parser.error(
            f"--minutes {args.minutes:g} starts none of these sections; expected at least {math.ceil(10 * least) / 10}."
        )
    if args.output.exists() and not args.output.is_dir():
        parser.error(f"--output {args.output} is a file; expected a folder.")
    kind, _, index = args.device.partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdecimal():
        parser.error(f"--device {args.device}; expected cuda, cuda:1 for another GPU, or cpu.")
    if kind == "cpu" and not args.tiny:
        parser.error("--device cpu runs tiny sizes only: add --tiny.")
    if kind == "cuda" and not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        print(
            f"gpu-check needs a CUDA device, and PyTorch sees none here: torch {torch.__version__} of "
            f"{sys.executable} {built}. "
            "make gpu-check PYTHON=... takes another Python; python -m benchmarks.gpu --device cpu --tiny runs the "
            "pieces on the CPU."
        )
        return 2
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        parser.error(f"--device {args.device}: this machine has {torch.cuda.device_count()} GPU(s).")
    for section in SECTIONS:
        if section not in sections:
            print(f"{section.name}: skipped, not among --sections")
    # End the processes that this one started with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    options = Options(args.device, args.tiny, args.compile_backend or ("eager" if args.tiny else "inductor"))
    results = run_all(sections, args.output, options, seconds=60 * args.minutes, resume=args.resume)
    print(f"written to {args.output}")
    return exit_code(results)


if __name__ == "__main__":
    raise SystemExit(main())
