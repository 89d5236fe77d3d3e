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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import median

import torch
from torch import Tensor
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from para_core.kernels import attention_hopper
from para_core.kernels.attention import empty_outputs, launch
from para_core.kernels.attention_configs import (
    HEAD_DIMS,
    HOPPER,
    LENGTHS,
    TABLE,
    Config,
    ConfigKey,
    KernelCall,
    keep,
    row_of,
)

# A function that returns the milliseconds of one call with these block sizes. It raises OutOfResources if they do not
# fit on the device.
Clock = Callable[[ConfigKey, Config], float]
# A candidate must take less than this fraction of the time of the table's block sizes: measurements vary by about 2 %.
WORTHWHILE = 0.98


def candidates(case: ConfigKey) -> Iterator[Config]:
    """Yield the block sizes of the table, followed by others that may fit in the registers."""
    own = TABLE[case]
    yield own
    for blocks in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
        block_m, _, num_warps, _ = blocks
        # Each warp needs at least 16 queries (a row of the matrix instruction), and at most 128 accumulators fit in the
        # registers of a thread.
        may_fit = block_m // num_warps >= 16 and block_m * case.head_dim <= num_warps * 32 * 128
        if may_fit and blocks != blocks_of(own):
            yield Config(*blocks, split_values=own.split_values)


def blocks_of(config: Config) -> tuple[int, ...]:
    return config.block_m, config.block_n, config.num_warps, config.num_stages


def fastest(case: ConfigKey, clock: Clock, *, rounds: int = 5) -> tuple[Config, dict[Config, float]]:
    """Return the fastest candidate for ``case``, and the median milliseconds of all candidates that fit.

    The block sizes of the table win unless others are more than 2 % faster. Each candidate is measured ``rounds``
    times, in turns, so that a device that slows down slows all of them.

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
    """Whether the kernel fits on the device with these block sizes. False if the Hopper kernel does not compile."""
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


def tune_hopper(portable: Mapping[ConfigKey, Config]) -> dict[ConfigKey, Config | None]:
    """Return the block sizes of the Hopper kernel to keep for each case that it supports; None for the portable kernel.

    ``portable`` are the block sizes of the portable kernel by case, which the Hopper kernel must outperform.
    """
    tuning: dict[ConfigKey, Config | None] = {}
    for case, config in portable.items():
        if case.head_dim in HOPPER:
            hopper = replace(case, tier="hopper")
            tuning[hopper] = best = faster(case, config, on_device, agrees_on_device)
            say(f"{hopper}: {'the portable kernel stays' if best is None else blocks_of(best)}")
    return tuning


def faster(
    case: ConfigKey, portable: Config, clock: Clock, agrees: Callable[[ConfigKey, Config], bool], *, rounds: int = 5
) -> Config | None:
    """Return the fastest block sizes with which the Hopper kernel fits and gives the portable kernel's results.

    Return None unless they are more than 2 % faster than ``portable``, the block sizes of the portable kernel.
    """
    hopper = replace(case, tier="hopper")
    valid = [config for config in HOPPER[case.head_dim] if fits(hopper, config, clock) and agrees(hopper, config)]
    medians = medians_of([(case, portable), *[(hopper, config) for config in valid]], clock, rounds)
    best = min(valid, key=lambda config: medians[hopper, config], default=None)
    return best if best and medians[hopper, best] <= WORTHWHILE * medians[case, portable] else None


def computes_the_same(
    case: ConfigKey, config: Config, portable: Config, query: Tensor, key: Tensor, value: Tensor
) -> bool:
    """Whether both kernels give results that agree within the precision of 16 bits, for three kinds of calls.

    The calls attend to all keys; to a key range per sample, with shifted queries; and to the keys in two halves, of
    which the second continues the result of the first.
    """
    num_keys, half = key.shape[2], key.shape[2] // 2
    ranges = torch.tensor([[[3, half + 5]], [[0, num_keys - 1]]], dtype=torch.int32, device=query.device)

    def calls(case: ConfigKey, config: Config) -> list[Tensor]:
        parts = [(key[:, :, part], value[:, :, part]) for part in (slice(half), slice(half, None))]
        first = attend(case, config, query, *parts[0], out_dtype=torch.float32)
        return [
            *attend(case, config, query, key, value),
            *attend(case, config, query, key, value, shift=half, key_ranges=ranges),
            *attend(case, config, query, *parts[1], shift=-half, so_far=first),
        ]

    pairs = zip(calls(case, config), calls(replace(case, tier="portable"), portable), strict=True)
    return all(_equal_in_16_bits(out, expected) for out, expected in pairs)


def _equal_in_16_bits(out: Tensor, expected: Tensor) -> bool:
    # Rows without a key have lse -inf. The difference of two infinities is NaN, so compare these rows here, and set
    # them to 0 below.
    empty = expected == -torch.inf
    if not torch.equal(out == -torch.inf, empty):
        return False
    out, expected = (x.masked_fill(empty, 0.0).float() for x in (out, expected))
    return bool((out - expected).norm() <= 1e-2 * expected.norm())


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
    numbers = (case.is_causal, shift, query.shape[-1] ** -0.5)
    out_so_far, lse_so_far = so_far or (None, None)
    call = KernelCall(query, key, value, None, key_ranges, out_so_far, lse_so_far, *numbers)
    (attention_hopper.launch if case.tier == "hopper" else launch)(config, call, out=out, lse=lse)
    return out, lse


def tensors_on_device(
    batch: int, num_queries: int, num_keys: int, head_dim: int, *, heads: int, key_heads: int
) -> list[Tensor]:
    """Return random query, key and value in bfloat16, ``[B, H, S, D]`` with ``[B, S, H, D]`` memory."""
    sizes = ((num_queries, heads), (num_keys, key_heads), (num_keys, key_heads))
    return [torch.randn(batch, *size, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for size in sizes]


def agrees_on_device(case: ConfigKey, config: Config) -> bool:
    """Whether the Hopper kernel gives the same results as the portable kernel on the current CUDA device."""
    tensors = tensors_on_device(2, 777, 1000, case.head_dim, heads=6, key_heads=2)
    agrees = computes_the_same(case, config, TABLE[replace(case, tier="portable")], *tensors)
    if not agrees:
        say(f"{case}: {blocks_of(config)} computes something else than the portable kernel")
    return agrees


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
    for head_dim, is_causal, length in product(args.head_dims, (False, True), LENGTHS):
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
        portable = {case: config for case, config in tuning.items() if config is not None}
        say(f"kept in {keep(torch.cuda.get_device_name(), tune_hopper(portable))}")
    return 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
