"""Find the attention kernel's fastest block sizes on this machine's GPU.

python -m para_core.kernels.tune

Measures candidates in turns, for each head dim, causal or not, and for long and short sequences. Writes the fastest to
``~/.cache/para_core/attention.json`` (or below ``XDG_CACHE_HOME``), where the kernel reads them. Nothing is measured at
import or in a call. The exit code is 2 without a GPU. With ``--hopper``, on a Hopper GPU, the Hopper kernel is measured
afterwards, and used if its results agree with those of the portable kernel and it is faster.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch
from torch import Tensor
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from para_core.kernels import attention_hopper
from para_core.kernels.attention import empty_outputs, launch
from para_core.kernels.attention_configs import HEAD_DIMS, LENGTHS, TABLE, Config, ConfigKey, keep, row_of

# A function that returns the milliseconds of one call with these block sizes. It raises OutOfResources if they do not
# fit on the device.
Clock = Callable[[ConfigKey, Config], float]
# A candidate must take less than this fraction of the time of the table's block sizes: measurements vary by about 2 %.
WORTHWHILE = 0.98


def candidates(case: ConfigKey) -> Iterator[Config]:
    """Yield the block sizes of the table, followed by others that may fit in the registers."""
    own = TABLE[case]
    yield own
    for block_m in (64, 128):
        for block_n in (32, 64, 128):
            for num_warps in (4, 8):
                for num_stages in (2, 3, 4):
                    config = Config(block_m, block_n, num_warps, num_stages, split_values=own.split_values)
                    # Each warp needs at least 16 queries (a row of the matrix instruction), and at most 128
                    # accumulators fit in the registers of a thread.
                    fits = block_m // num_warps >= 16 and block_m * case.head_dim <= num_warps * 32 * 128
                    if fits and blocks_of(config) != blocks_of(own):
                        yield config


def blocks_of(config: Config) -> tuple[int, ...]:
    return config.block_m, config.block_n, config.num_warps, config.num_stages


def fastest(case: ConfigKey, clock: Clock, *, rounds: int = 5) -> tuple[Config, dict[Config, float]]:
    """Return the fastest candidate for ``case``, and the median milliseconds of all candidates that fit.

    The block sizes of the table win unless others are more than 2 % faster. Candidates are measured in turns, so that a
    device that slows down slows all of them.

    Args:
        case: The row of the table.
        clock: Measures one call.
        rounds: Number of measurements of each candidate.

    Raises:
        RuntimeError: If no candidate fits.
    """
    fitting = [config for config in candidates(case) if fits(case, config, clock)]
    if not fitting:
        raise RuntimeError(f"no block sizes fit for {case}: the kernel cannot be launched on this device.")
    turns = [(case, config) for config in fitting]
    medians = {config: milliseconds for (_, config), milliseconds in medians_of(turns, clock, rounds).items()}
    best = min(fitting, key=medians.__getitem__)
    own = TABLE[case]
    if own in medians and medians[best] > WORTHWHILE * medians[own]:
        best = own
    return best, medians


def medians_of(
    turns: Sequence[tuple[ConfigKey, Config]], clock: Clock, rounds: int
) -> dict[tuple[ConfigKey, Config], float]:
    """Return the median milliseconds of each case and config, measured ``rounds`` times in turns."""
    times: dict[tuple[ConfigKey, Config], list[float]] = {turn: [] for turn in turns}
    for _ in range(rounds):
        for case, config in turns:
            times[case, config].append(clock(case, config))
    return {turn: median(of_turn) for turn, of_turn in times.items()}


def fits(case: ConfigKey, config: Config, clock: Clock) -> bool:
    """Whether the kernel compiles with these block sizes and fits on the device."""
    try:
        # The first call compiles the kernel.
        clock(case, config)
    except OutOfResources:
        return False
    except (RuntimeError, TritonError) as error:
        # Some versions of Triton fail to compile the Hopper kernel, which is then not tuned.
        if case.tier != "hopper":
            raise
        say(f"{case}: {blocks_of(config)} does not compile: {type(error).__name__} {str(error).partition(chr(10))[0]}")
        return False
    return True


# -- The following functions measure on the current CUDA device.


def on_device(case: ConfigKey, config: Config) -> float:
    """Return the milliseconds of one call on the current CUDA device, in bfloat16 with 24 heads."""
    num_tokens = 8192 if case.length == "long" else 1024
    query, key, value = tensors_on_device(1, num_tokens, num_tokens, case.head_dim, heads=24, key_heads=24)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The first iteration is a warm-up, and the second one is measured.
    for _ in range(2):
        start.record()
        attend(case, config, query, key, value)
        end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def attend(
    case: ConfigKey,
    config: Config,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    shift: int = 0,
    key_ranges: Tensor | None = None,
    so_far: tuple[Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Call the portable or Hopper kernel, as ``case`` says, with the block sizes of ``config``. Returns out and lse.

    ``shift`` is ``query_offset - key_offset``; for the other arguments see :func:`attention_reference.attention`.
    """
    out, lse = empty_outputs(query, value, query.dtype if out_dtype is None else out_dtype)
    rest = (key_ranges, *(so_far or (None, None)), case.is_causal, shift, query.shape[-1] ** -0.5)
    if case.tier == "hopper":
        attention_hopper.launch(config, query, key, value, *rest, out=out, lse=lse)
    else:
        launch(config, query, key, value, None, *rest, out=out, lse=lse)
    return out, lse


def tensors_on_device(
    batch: int, num_queries: int, num_keys: int, head_dim: int, *, heads: int, key_heads: int
) -> list[Tensor]:
    """Return random query, key and value in bfloat16, ``[B, H, S, D]`` with ``[B, S, H, D]`` memory."""
    sizes = ((num_queries, heads), (num_keys, key_heads), (num_keys, key_heads))
    return [torch.randn(batch, *size, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for size in sizes]


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune, print the results and write them to the cache file. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", choices=HEAD_DIMS, default=list(HEAD_DIMS))
    parser.add_argument("--hopper", action="store_true", help="also try the Hopper tier (needs compute capability 9.0)")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        say(f"tuning needs a CUDA device, and PyTorch {torch.__version__} finds none. The table is used.")
        return 2
    arch = row_of(*torch.cuda.get_device_capability())
    if args.hopper and arch != 90:
        say(f"--hopper is for compute capability 9.0, and this device's row is {arch / 10}. Omit it.")
        return 2
    tuning: dict[ConfigKey, Config | None] = {}
    for head_dim in args.head_dims:
        for is_causal in (False, True):
            for length in LENGTHS:
                case = ConfigKey(arch, head_dim, is_causal, length)
                best, times = fastest(case, on_device)
                tuning[case] = best
                own = times.get(TABLE[case])
                comparison = "the table's does not fit" if own is None else f"the table's {own:.3f} ms"
                say(f"{case}: {blocks_of(best)} {times[best]:.3f} ms; {comparison}")
    say(f"kept in {keep(torch.cuda.get_device_name(), tuning)}")
    if args.hopper:
        # Tune the Hopper kernel after the results above were written, so that an error of the device does not lose
        # them.
        from para_core.kernels.tune_hopper import tune_hopper

        portable = {case: config for case, config in tuning.items() if config is not None}
        say(f"kept in {keep(torch.cuda.get_device_name(), tune_hopper(portable))}")
    return 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
