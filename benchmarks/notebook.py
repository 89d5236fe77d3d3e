"""Run the notebook of parallel_examples on the small FLUX, two ranks of a CPU, and write its outputs into it.

python -m benchmarks.notebook
"""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from zoo.flux import PIPELINE

NOTEBOOK = Path(__file__).parents[1] / "parallel_examples/launch.ipynb"


def run() -> nbformat.NotebookNode:
    """Return the executed notebook. Raise nbclient's CellExecutionError if a cell fails."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    settings = {"MODEL": str(PIPELINE), "SIZE": "128", "RANKS": "2", "PYTHONPATH": str(NOTEBOOK.parents[1])}
    # tqdm warns that ipywidgets is not installed, which a reader of the outputs need not know.
    kernel_environment = {**os.environ, **settings, "PYTHONWARNINGS": "ignore"}
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute(env=kernel_environment)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":
            cell.outputs = _as_shown(cell.outputs)
    return notebook


def _as_shown(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Return the outputs of a cell with its streams joined, and of each progress bar only the last state."""
    texts: dict[str, str] = {}
    for output in outputs:
        if output.output_type == "stream":
            texts[output.name] = texts.get(output.name, "") + output.text
    streams = []
    for name, text in texts.items():
        lines = [line.split("\r")[-1] for line in text.replace(str(PIPELINE), "zoo/flux/pipeline").split("\n")]
        streams.append(nbformat.v4.new_output("stream", name=name, text="\n".join(lines)))
    rest = [output for output in outputs if output.output_type != "stream"]
    for output in rest:
        output.get("data", {}).pop("image/jpeg", None)
    return [*streams, *rest]


if __name__ == "__main__":
    nbformat.write(run(), NOTEBOOK)
