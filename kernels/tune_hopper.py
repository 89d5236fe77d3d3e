"""Whether the Hopper tier is right and faster on this machine's GPU, where it has to run for the first time: ``tune --hopper``."""

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
    """Of each case that the tier takes what is to be kept, beside the block sizes of the portable kernel; None: nothing."""
    found: dict[ConfigKey, Config | None] = {}
    for case, config in portable.items():
        if case.head_dim in HOPPER:
            hopper = replace(case, tier="hopper")
            found[hopper] = best = faster(case, config, on_device, agrees_on_device)
            say(f"{hopper}: {'the portable kernel stays' if best is None else blocks_of(best)}")
    return found


def faster(
    case: ConfigKey, portable: Config, clock: Clock, agrees: Callable[[ConfigKey, Config], bool], *, rounds: int = 5
) -> Config | None:
    """What compiles, fits, computes the same, and is faster than ``portable`` by 2 %: the fastest of the tier, or None."""
    hopper = replace(case, tier="hopper")
    tried = [one for one in HOPPER[case.head_dim] if fits(hopper, one, clock) and agrees(hopper, one)]
    medians = medians_of([(case, portable), *[(hopper, one) for one in tried]], clock, rounds)
    best = min(tried, key=lambda one: medians[hopper, one], default=None)
    return best if best and medians[hopper, best] <= WORTHWHILE * medians[case, portable] else None


def agrees_on_device(case: ConfigKey, config: Config) -> bool:
    """Whether it gives what the portable kernel gives, on the current CUDA device."""
    tensors = tensors_on_device(2, 777, 1000, case.head_dim, heads=6, key_heads=2)
    agrees = computes_the_same(case, config, TABLE[replace(case, tier="portable")], *tensors)
    if not agrees:
        say(f"{case}: {blocks_of(config)} is no candidate: it does not compute what the portable kernel does")
    return agrees


def computes_the_same(
    case: ConfigKey, config: Config, portable: Config, query: Tensor, key: Tensor, value: Tensor
) -> bool:
    """All keys; a range of them for each of two samples, with later queries; the second half of the keys after the first."""
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
    return all(_alike(found, expected) for found, expected in pairs)


def _alike(found: Tensor, expected: Tensor) -> bool:
    """Up to what 16 bits round; rows without a key have -inf in both."""
    empty = expected == -torch.inf
    if not torch.equal(found == -torch.inf, empty):
        return False
    found, expected = (x.masked_fill(empty, 0.0).float() for x in (found, expected))
    return bool((found - expected).norm() <= 1e-2 * expected.norm())
