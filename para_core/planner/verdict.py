"""The first lines of a plan: whether the generation fits, what makes it fit, and which seconds are normal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from para_core.planner.cost import Machine
from para_core.planner.prediction import RESERVED, MeshPrediction, PublishedRun, Workload

# Published seconds of other software, divided by the predicted seconds: the smallest and the largest ratio of compiled
# transformers, of eager ones on one device, and of eager ones on several. See benchmarks/results/planner_check.json.
PUBLISHED_RATIOS = {"compiled": (1.0, 1.64), "eager": (0.66, 3.75), "eager, one device": (0.61, 1.55)}


@dataclass(frozen=True)
class Fit:
    """Predictions that tell whether a generation fits on one card, and what makes it fit.

    Args:
        whole (`MeshPrediction`): One card that holds everything, in the placement that the user has chosen.
        ways (`tuple[MeshPrediction, ...]`): If that does not fit: of each way that makes it fit (host memory, 8 bits,
            tensor parallelism, FSDP2) the fastest mesh on the fewest cards.
    """

    whole: MeshPrediction
    ways: tuple[MeshPrediction, ...] = ()


def kind_of_run(machine: Machine, ranks: int) -> str:
    """Return the kind of published runs with which a prediction is compared, a key of ``PUBLISHED_RATIOS``."""
    if machine.runtime.compiled:
        return "compiled"
    return "eager, one device" if ranks == 1 else "eager"


def fits_line(fit: Fit, best: MeshPrediction, work: Workload, machine: Machine) -> str:
    """Return one line: whether the generation fits the cards, and which seconds are normal."""
    ranks, name = best.shape.ranks, f"{work.name}, {work.steps} steps"
    cards = f"{ranks} × {machine.device.name}"
    if best.problem is not None:
        return f"{name}: cannot run on {cards}: {best.problem}."
    if not best.fits:
        return f"{name}: does not fit {cards}: {_missing(best, machine)}"
    whole = _gigabytes(fit.whole.memory)
    held = f"{_gigabytes(best.memory)} of {_gigabytes(_size(machine))} GB" + (" on each" if ranks > 1 else "")
    if fit.whole.fits and str(best) == str(fit.whole):
        verdict = f"fits {cards}: {held}"
    elif fit.whole.fits:
        verdict = f"fits {cards} with {_without_one_rank(best)}: {held} (one card holds all of it, {whole} GB)"
    else:
        verdict = f"fits {cards} only with {_without_one_rank(best)}: {held} (all of it needs {whole} GB)"
    return f"{name}: {verdict}. {_normal(best, work, machine)}"


def _missing(best: MeshPrediction, machine: Machine) -> str:
    """Return how much memory a mesh lacks."""
    room = _gigabytes(best.room)
    of_card = f" (the card has {_gigabytes(machine.device.memory)} GB)" if machine.room is None else ""
    return f"a rank needs at least {_gigabytes(best.memory)} GB ({best}), and may hold {room} GB{of_card}."


def _size(machine: Machine) -> float:
    """Return the bytes that users know of a card: its memory, or what they allow a rank to hold."""
    return machine.device.memory if machine.room is None else machine.room


def _without_one_rank(row: MeshPrediction) -> str:
    return str(row).removeprefix("one rank, ")


def _normal(best: MeshPrediction, work: Workload, machine: Machine) -> str:
    """Return which seconds are normal: those of published runs of this generation, or of runs of this kind."""
    kind = kind_of_run(machine, best.shape.ranks)
    least, most = PUBLISHED_RATIOS[kind]
    quick, slow = duration(least * best.seconds), duration(most * best.seconds)
    runs = kind.replace("eager, one device", "eager")
    return (
        f"Normal: {quick} to {slow} ({duration(best.seconds)} predicted; published {runs} runs took {least:g} to "
        f"{most:g} times the prediction)."
    )


def ways_line(fit: Fit, machine: Machine) -> str:
    """Return a line with what makes the generation fit; empty if one card holds all of it."""
    if fit.whole.fits:
        return ""
    if not fit.ways:
        return "Nothing makes it fit up to 8 cards: take larger cards, or a smaller size."
    ways = []
    for row in fit.ways:
        ranks, named = row.shape.ranks, row.command_options
        named.pop("mesh", None)
        option = " ".join(f"--{name} {value}" for name, value in named.items() if name != "resident-blocks")
        cards = "1 card" if ranks == 1 else f"{ranks} cards"
        inexact = ", not exact" if row.placement.quantize is not None else ""
        ways.append(f"{option} ({cards}, {_gigabytes(row.memory)} GB{inexact})")
    reserved = f"; CUDA keeps {RESERVED / 1e9:.0f} GB of a card" if machine.room is None else ""
    return f"What makes it fit: {'; '.join(ways)}{reserved}."


def published_line(work: Workload, machine: Machine) -> str:
    """Return a line with the seconds of published runs of this generation on this card; empty if there are none."""
    runs = [run for run in work.published if run.device == machine.device.name]
    if not runs:
        return ""
    by_ranks: dict[int, list[PublishedRun]] = {}
    for run in sorted(runs, key=lambda run: (run.ranks, run.seconds)):
        by_ranks.setdefault(run.ranks, []).append(run)
    groups = []
    for ranks, same in by_ranks.items():
        quick, slow = duration(same[0].seconds), duration(same[-1].seconds)
        seconds = quick if quick == slow else f"{quick} to {slow}"
        groups.append(f"{ranks} card{'s' * (ranks > 1)} {seconds}")
    names = "; ".join(dict.fromkeys(run.name for run in runs))
    return f"Published for this on {machine.device.name}: {', '.join(groups)} ({names})."


def first_lines(fit: Fit, best: MeshPrediction, work: Workload, machine: Machine) -> Sequence[str]:
    """Return the first lines of a plan: whether it fits and what is normal, what makes it fit, and published runs."""
    lines = (fits_line(fit, best, work, machine), ways_line(fit, machine), published_line(work, machine))
    return [line for line in lines if line]


def _gigabytes(size: float) -> str:
    """Return bytes as gigabytes, with two digits or all before the decimal point.

    >>> _gigabytes(133.6e9), _gigabytes(5.04e9), _gigabytes(31e6)
    ('134', '5', '0.031')
    """
    return f"{size / 1e9:.0f}" if size >= 9.95e9 else f"{size / 1e9:.2g}"


def duration(seconds: float) -> str:
    """Return a duration as text: seconds with three digits if it is below two minutes, else in two units.

    >>> print(duration(9.876), duration(754), duration(5025), sep=", ")
    9.88 s, 12 min 34 s, 1 h 23 min
    """
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
