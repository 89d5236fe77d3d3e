"""Find the attention kernel's fastest block sizes on this machine's GPU:  python -m para_core.kernels.tune

Measures candidates for each head dim, causal or not, long and short, in turns; keeps the winners in ``~/.cache/para_core/attention.json``
(or ``XDG_CACHE_HOME``), where the kernel finds them from then on. Nothing is measured at import or in a call. Exit code 2: no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch
from triton.runtime.errors import OutOfResources

from para_core.kernels.attention import launch
from para_core.kernels.attention_configs import HEAD_DIMS, LENGTHS, TABLE, Case, Config, keep, row_of

# Milliseconds of a call with these block sizes; raises OutOfResources where they do not fit.
Clock = Callable[[Case, Config], float]
# A candidate is kept in place of the table's where it is faster by more than measurements differ.
WORTHWHILE = 0.98


def candidates(case: Case) -> Iterator[Config]:
    """The table's own, first, and others that may fit."""
    own = TABLE[case]
    yield own
    for block_m in (64, 128):
        for block_n in (32, 64, 128):
            for num_warps in (4, 8):
                for num_stages in (2, 3, 4):
                    config = Config(block_m, block_n, num_warps, num_stages)
                    # 8 warps of 64 queries would share rows; sums of 128 × 256 do not fit into the registers of 4.
                    fits = block_m // num_warps >= 16 and block_m * case.head_dim <= num_warps * 32 * 128
                    if fits and _blocks(config) != _blocks(own):
                        yield config


def _blocks(config: Config) -> tuple[int, ...]:
    return config.block_m, config.block_n, config.num_warps, config.num_stages


def fastest(case: Case, clock: Clock, *, rounds: int = 5) -> tuple[Config, dict[Config, float]]:
    """The fastest candidate, and the median milliseconds of all that fit; the table's, unless another is faster by 2 %.

    Candidates take turns: what slows the device down for a while slows all of them.
    """
    fitting = [config for config in candidates(case) if _fits(case, config, clock)]
    if not fitting:
        raise RuntimeError(f"no block sizes fit for {case}: the kernel cannot be launched on this device.")
    times: dict[Config, list[float]] = {config: [] for config in fitting}
    for _ in range(rounds):
        for config in fitting:
            times[config].append(clock(case, config))
    medians = {config: median(found) for config, found in times.items()}
    best = min(fitting, key=medians.__getitem__)
    own = TABLE[case]
    if own in medians and medians[best] > WORTHWHILE * medians[own]:
        best = own
    return best, medians


def _fits(case: Case, config: Config, clock: Clock) -> bool:
    try:
        clock(case, config)  # also what compiles it
    except OutOfResources:
        return False
    return True


def on_device(case: Case, config: Config) -> float:
    """Milliseconds of one call on the current CUDA device, bfloat16, 24 heads."""
    num_tokens = 8192 if case.length == "long" else 1024
    query, key, value, out = (
        torch.randn(1, num_tokens, 24, case.head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(4)
    )
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first one warms up
        start.record()
        launch(
            config, query, key, value, None, None, None, None, case.is_causal, 0, case.head_dim**-0.5, out=out, lse=lse
        )
        end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune, tell and keep what was found; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", choices=HEAD_DIMS, default=list(HEAD_DIMS))
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        _say(f"tuning needs a CUDA device, and PyTorch {torch.__version__} sees none here. The table is used as it is.")
        return 2
    arch = row_of(*torch.cuda.get_device_capability())
    found: dict[Case, Config] = {}
    for head_dim in args.head_dims:
        for is_causal in (False, True):
            for length in LENGTHS:
                case = Case(arch, head_dim, is_causal, length)
                found[case], times = fastest(case, on_device)
                own = times.get(TABLE[case])
                beside = "the table's does not fit" if own is None else f"the table's {own:.3f} ms"
                _say(f"{case}: {_blocks(found[case])} {times[found[case]]:.3f} ms; {beside}")
    _say(f"kept in {keep(torch.cuda.get_device_name(), found)}")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
