"""The bar chart of a plan: the seconds of each mesh by their parts, the fastest one marked, and those of one rank."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from para_core.planner.prediction import MeshPrediction
from para_core.planner.verdict import duration

if TYPE_CHECKING:
    from para_core.planner.mesh_plan import MeshPlan

# The parts of a generation, with colours that differ in lightness, too.
_PARTS = {
    "products": "#1b6ca8",
    "attention": "#6fb1e0",
    "other operators": "#b9c4cc",
    "communication": "#e07b39",
    "host": "#8c2d04",
    "text and VAE": "#7a9a3a",
}
_BEST = "#0a7d33"


def draw(plan: MeshPlan, path: str | Path, rows: int) -> None:
    """Save the chart of ``plan`` to ``path``, with the first ``rows`` meshes that run and fit.

    Below them stand, for comparison, the fastest row of one rank (or of the fewest ranks with one that fits), and for a
    plan of one rank those of more ranks. Without any mesh that fits, the chart says so.
    """
    from matplotlib.figure import Figure

    shown = [row for row in plan.rows if row.runs][:rows]
    others = [row for _, row in sorted(plan.fewer.items())][:1] or list(plan.larger.values())
    bars = [*shown, *(others if shown else [])]
    names = [textwrap.fill(str(row), 34) for row in shown]
    names += [textwrap.fill(_name(row), 34) for row in bars[len(shown) :]]
    lines = sum(name.count("\n") + 1 for name in names)
    title = textwrap.wrap(plan.title, 88)
    height = 1.5 + 0.24 * len(title) + 0.22 * lines + 0.2 * len(bars)
    figure = Figure(figsize=(10, max(2.2, height)), layout="constrained")
    panel = figure.subplots()
    # A title of the figure, not of the panel, has its whole width.
    figure.suptitle("\n".join(title), fontsize=11, parse_math=False)
    if not bars:
        panel.text(0.5, 0.5, textwrap.fill(plan.advice, 90), ha="center", va="center")
        panel.set_axis_off()
    else:
        _draw_bars(panel, bars, names, len(shown))
    figure.savefig(path, dpi=110)


def _draw_bars(panel: Any, bars: list[MeshPrediction], names: list[str], num_shown: int) -> None:
    """Draw the bars from top to bottom, each with its parts, and with its seconds at its end.

    The first of the ``num_shown`` bars of the plan is the fastest. A bar of comparison that is much longer is cut.
    """
    positions = list(range(len(bars)))[::-1]
    longest = max(row.seconds for row in bars[:num_shown])
    # Leave room for the seconds at the end of the longest bar.
    limit = 1.25 * min(max(row.seconds for row in bars), 3 * longest)
    left = [0.0] * len(bars)
    for part, color in _PARTS.items():
        widths = [_seconds(row)[part] for row in bars]
        panel.barh(positions, widths, left=left, label=part, color=color, height=0.62)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for index, (position, row) in enumerate(zip(positions, bars, strict=True)):
        text = f" {duration(row.seconds)}" + (" – fastest" if index == 0 and num_shown > 1 else "")
        style = {"color": _BEST, "fontweight": "bold"} if index == 0 else {}
        if row.seconds > limit:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
            panel.text(limit, position, f"{text}, cut here →", va="center", ha="right", bbox=box)
        else:
            panel.text(row.seconds, position, text, va="center", **style)
    panel.set_yticks(positions, names)
    if len(bars) > 1:
        panel.get_yticklabels()[0].set(color=_BEST, fontweight="bold")
    panel.set_xlim(0, limit)
    panel.set_xlabel("predicted seconds of one generation")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _name(row: MeshPrediction) -> str:
    """Return the name of a bar that is there for comparison."""
    ranks = row.shape.ranks
    return f"for comparison: {row}" if ranks == 1 else f"with {ranks} ranks: {row}"


def _seconds(row: MeshPrediction) -> dict[str, float]:
    """Return the seconds of a generation by part. The parts of PipeFusion's steps are scaled to their sum."""
    step, denoising = row.step, row.seconds - row.encoder - row.decoder
    scale = denoising / step.total if step.total else 0.0
    return {
        "products": step.products * scale,
        "attention": step.attention * scale,
        "other operators": step.other * scale,
        "communication": step.communication * scale,
        "host": step.host * scale,
        "text and VAE": row.encoder + row.decoder,
    }
