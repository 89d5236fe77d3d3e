"""Tune the Hopper kernel on this machine's GPU, after comparing its results with those of the portable kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from para_core.kernels.attention_configs import HOPPER, TABLE, Config, ConfigKey
from para_core.kernels.tune import (
    WORTHWHILE,
    Clock,
    attend,
    blocks_of,
    fits,
    medians_of,
    on_device,
    say,
    tensors_on_device,
)


def tune_hopper(portable: Mapping[ConfigKey, Config]) -> dict[ConfigKey, Config | None]:
    """Return the block sizes of the Hopper kernel to keep for each case that it supports.

    A value is None if the portable kernel is to be used for that case.

    Args:
        portable: Block sizes of the portable kernel by case, which the Hopper kernel must outperform.
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


def agrees_on_device(case: ConfigKey, config: Config) -> bool:
    """Whether the Hopper kernel gives the same results as the portable kernel on the current CUDA device."""
    tensors = tensors_on_device(2, 777, 1000, case.head_dim, heads=6, key_heads=2)
    agrees = computes_the_same(case, config, TABLE[replace(case, tier="portable")], *tensors)
    if not agrees:
        say(f"{case}: {blocks_of(config)} computes something else than the portable kernel")
    return agrees


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
