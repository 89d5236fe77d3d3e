"""Pipelines on several ranks: the latents of each, the bytes that each rank sends, and the same in bfloat16.

Checks of `benchmarks.pipelines.exactness`, with the tiny pipelines with random weights and the trained FLUX.1 of the
zoo.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.cache.ways import load
from benchmarks.harness import counted_traffic, largest_over_ranks, markdown_table, read_results, relative_error
from benchmarks.pipelines import observe
from benchmarks.pipelines.traffic import ModelCall, sent_in_rounds
from para_core.adapters import parallelize_pipe
from para_core.adapters.cfg.output_form import predict_output
from para_core.adapters.planner.mesh import MeshShape
from para_core.adapters.registry import plan_for, transformers_of
from zoo.tiny.pipelines import PIPELINES as OTHERS
from zoo.tiny.pipelines import TinyPipeline

# -- bfloat16, with the random numbers of float32.


# These tiny pipelines are not tried. The values give the reason.
NOT_IN_BFLOAT16 = {
    "lucy": "the unmodified pipeline gives its VAE float32",
    "visual cloze": "two pipelines, and casting reaches one of them",
    **dict.fromkeys(
        (
            "qwen-image, editing",
            "qwen-image, editing, inpainting",
            "qwen-image, editing two images",
            "qwen-image, layers",
            "cosmos, video",
        ),
        "PyTorch has no avg_pool3d in bfloat16 on a CPU",
    ),
    **dict.fromkeys(
        (
            "kandinsky 5, one image",
            "kandinsky 5, one image, image",
            "kandinsky 5",
            "kandinsky 5, image",
            "z-image, image",
            "z-image, inpainting",
            "joyimage plus",
            "longcat-image, editing",
        ),
        "the unmodified pipeline mixes float32 and bfloat16, which raises on a CPU",
    ),
    **dict.fromkeys(
        ("stable audio", "stable audio 3", "stable audio 3, sound", "longcat-audio", "ace-step"),
        "the weight norm of its autoencoder keeps tensors that cannot be copied",
    ),
}


def in_bfloat16(pipe: Any) -> Any:
    """Give ``pipe`` bfloat16 copies of its models, because tiny pipelines share their encoders."""
    parts = {name: copy.deepcopy(part) for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    pipe.register_modules(**parts)
    return pipe.to(torch.bfloat16)


def cast(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call with float tensors in bfloat16."""
    return {
        name: value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in options.items()
    }


@contextmanager
def noise_of_float32() -> Iterator[None]:
    """Make ``torch.randn`` draw in float32 and round in this context, because it draws other numbers in 16 bits with
    the same seed.
    """
    randn = torch.randn

    def rounded(*size: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        noise = randn(*size, dtype=torch.float32 if dtype == torch.bfloat16 else dtype, **options)
        return noise if dtype is None else noise.to(dtype)

    with mock.patch.object(torch, "randn", rounded):
        yield


# -- The bytes that each rank sends, predicted from one run of the unmodified pipeline on one device.


@contextmanager
def observed(model: nn.Module, batch: int = 1) -> Iterator[list[ModelCall]]:
    """List the calls of ``model``. Its samples are computed in ``batch`` shares if its plan would share them."""
    plan = plan_for(model)
    if plan is None:
        raise TypeError(f"there is no plan for {type(model).__name__}.")
    with observe.observed(model, plan, batch, is_foreseen=lambda *call: predict_output(*call) is not None) as calls:
        yield calls


def takes_turns(pipe: Any) -> bool:
    """Return whether ranks along ``batch`` take turns in the calls of a step. Otherwise they share the samples of each
    call.
    """
    plan = plan_for(pipe.transformer)
    # Perturbed attention guidance separates a batch inside the model.
    return plan is not None and (not plan.batched or hasattr(pipe, "pag_applied_layers"))


def observe_pipeline(pipe: Any, generate: Callable[[], Any], batch: int = 1) -> list[list[ModelCall]]:
    """Return the calls of each step of ``generate()``, which calls ``pipe``, as :func:`observed` lists them."""
    models = list(transformers_of(pipe).values())
    batch = 1 if takes_turns(pipe) else batch
    rounds: list[list[ModelCall]] = []
    # Patch the class, because LTX-2 copies its scheduler for sound.
    scheduler = type(pipe.scheduler)
    step = scheduler.step
    with ExitStack() as stack:
        observed_calls = [stack.enter_context(observed(model, batch)) for model in models]

        def end_round() -> None:
            calls = [call for calls in observed_calls for call in calls]
            if calls:
                rounds.append(calls)
            for each in observed_calls:
                each.clear()

        def step_and_end(*args: Any, **kwargs: Any) -> Any:
            end_round()
            return step(*args, **kwargs)

        stack.enter_context(mock.patch.object(scheduler, "step", functools.wraps(step)(step_and_end)))
        generate()
    return rounds


# -- The checks.


# Each column of the table has a mesh (batch, ring, ulysses).
MESHES = {"2 Ulysses": (1, 1, 2), "2 ring": (1, 2, 1), "2 batch": (2, 1, 1), "3 Ulysses": (1, 1, 3), "2 × 2": (1, 2, 2)}
TWO_RANKS = ("2 Ulysses", "2 ring", "2 batch")
MESHES_OF_16_BITS = TWO_RANKS[:2]


_FLUX_SIZE = {"height": 48, "width": 80, "max_sequence_length": 13}
PIPELINES = {
    "flux": TinyPipeline(lambda _: load(), "FluxPipeline", _FLUX_SIZE),
    "flux, true guidance": TinyPipeline(
        lambda _: load(), "FluxPipeline", {**_FLUX_SIZE, "negative_prompt": "a blue square", "true_cfg_scale": 3.0}
    ),
    **OTHERS,
}


IN_BFLOAT16 = [name for name in PIPELINES if name not in NOT_IN_BFLOAT16]


def generate(pipe: Any, name: str, *, bfloat16: bool = False) -> Tensor:
    """Return the latents after all steps."""
    call = PIPELINES[name].call()
    if bfloat16:
        with noise_of_float32():
            return _generate(pipe, cast(call))
    return _generate(pipe, call)


def _generate(pipe: Any, call: dict[str, Any]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Some ControlNets encode their images with noise of the default generator.
        torch.manual_seed(7)
        images = pipe(**call, return_dict=False)[0]
    # FramePack returns the latents of each section.
    return torch.cat(images, dim=2) if isinstance(images, list) else torch.as_tensor(images)


def measure_mesh(
    pipe: Any, name: str, mesh: DeviceMesh, expected: Tensor, rounds: Sequence[Sequence[ModelCall]]
) -> dict[str, Any]:
    """Return the error of the worst rank for one pipeline on one mesh, and the bytes that each rank sends in all
    steps.
    """
    parallelize_pipe(pipe, mesh=mesh)
    with counted_traffic() as traffic:
        out = generate(pipe, name)
    error = largest_over_ranks(relative_error(out, expected))
    counted = [0] * mesh.size()
    dist.all_gather_object(counted, traffic.bytes)
    batch, ring, ulysses = mesh.shape
    shape = MeshShape(batch, ring=ring, ulysses=ulysses)
    foretold = [sent_in_rounds(rounds, shape, rank, apart=takes_turns(pipe)) for rank in range(mesh.size())]
    return {
        "error": error,
        "bytes of each rank": counted,
        "by the formula": foretold,
    }


def measure(names: list[str]) -> dict[str, Any]:
    """Return the cells of pipelines on all meshes with this number of ranks."""
    meshes = device_meshes(label for label, shape in MESHES.items() if prod(shape) == dist.get_world_size())
    rows = {}
    for name in names:
        pipe = PIPELINES[name].build()
        expected = generate(pipe, name)
        rounds = {
            batch: observe_pipeline(pipe, partial(generate, pipe, name), batch)
            for batch in {mesh.shape[0] for mesh in meshes.values()}
        }
        rows[name] = {
            label: measure_mesh(pipe, name, mesh, expected, rounds[mesh.shape[0]]) for label, mesh in meshes.items()
        }
    return rows


def measure_bfloat16(names: list[str]) -> dict[str, Any]:
    """Return the errors from float32 of pipelines in bfloat16, of the unmodified one and on each mesh."""
    meshes, rows = device_meshes(MESHES_OF_16_BITS), {}
    for name in names:
        pipe = PIPELINES[name].build()
        exact = generate(pipe, name)
        pipe = in_bfloat16(pipe)
        alone = generate(pipe, name, bfloat16=True)
        row = {"alone": {"error": relative_error(alone, exact)}}
        for label, mesh in meshes.items():
            out = generate(parallelize_pipe(pipe, mesh=mesh), name, bfloat16=True)
            row[label] = {
                "error": largest_over_ranks(relative_error(out, exact)),
                "from the unmodified": largest_over_ranks(relative_error(out, alone)),
            }
        rows[name] = row
    return rows


def device_meshes(labels: Iterable[str]) -> dict[str, DeviceMesh]:
    names = ("batch", "ring", "ulysses")
    return {label: init_device_mesh("cpu", MESHES[label], mesh_dim_names=names) for label in labels}


def problems(rows: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Return a line for each cell in which a rank sent other bytes than the formula gives."""
    return [
        f"{name} on {label}: {cell['bytes of each rank']} bytes were counted; the formula gives "
        f"{cell['by the formula']}."
        for name, row in rows.items()
        for label, cell in row.items()
        if cell["bytes of each rank"] != cell["by the formula"]
    ]


def parts() -> dict[str, list[str]]:
    """Return the parts of docs/measured/exactness.md. The JSON has the cell of each pipeline."""
    rows, rows_of_16_bits = (read_results(name)["pipelines"] for name in ("pipelines", "pipelines_bfloat16"))
    cells = []
    for label in MESHES:
        errors = {name: row[label]["error"] for name, row in rows.items()}
        worst = max(errors, key=errors.__getitem__)
        same = sum(error == 0 for error in errors.values())
        cells.append([label, len(errors), same, f"{median(errors.values()):.0e}", f"{errors[worst]:.0e} ({worst})"])
    cells_of_16_bits = []
    for label in MESHES_OF_16_BITS:
        ratios = [row[label]["error"] / row["alone"]["error"] for row in rows_of_16_bits.values()]
        same = sum(row[label]["from the unmodified"] == 0 for row in rows_of_16_bits.values())
        cells_of_16_bits.append(
            [label, len(ratios), same, f"{min(ratios):.2f}", f"{median(ratios):.2f}", f"{max(ratios):.2f}"]
        )
    untried = f"{len(NOT_IN_BFLOAT16)} more were not tried: without para_core they do not run in bfloat16 on a CPU."
    heads = ["mesh", "pipelines", "same bits"]
    return {
        "pipelines": markdown_table([*heads, "median error", "largest error"], cells),
        "bfloat16": markdown_table([*heads, "smallest ratio", "median ratio", "largest ratio"], cells_of_16_bits),
        "not in bfloat16": [untried],
    }
