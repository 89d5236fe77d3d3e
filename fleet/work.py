"""Generating one request on the ranks of a group, which may stop together after any step."""

from __future__ import annotations

import importlib.metadata
import inspect
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from para_core.adapters import cache_report
from para_core.adapters.applied import mesh_of
from para_core.distributed.collectives import broadcast_bytes
from para_core.distributed.mesh import GuidedMesh
from para_core.fleet.outputs import Output, encode
from para_core.fleet.recipe import Recipe, mesh_shape
from para_core.fleet.request import Request, call_arguments
from para_core.instance_patching import original_class


class Cancelled(Exception):
    """The request was cancelled: every rank of its group stopped after the same step."""


@dataclass(frozen=True)
class Watch:
    """What is told and asked at the end of each step.

    Args:
        progress: takes the number of steps done.
        cancelled: asked on the first rank alone, which tells the others; None: nothing is exchanged.
    """

    progress: Callable[[int], None] | None = None
    cancelled: Callable[[], bool] | None = None


@dataclass(frozen=True)
class Result:
    """What a group of ranks made of one request: files, and what is known of them."""

    outputs: tuple[Output, ...]
    metadata: Mapping[str, Any]


def generate(pipe: Any, request: Request, recipe: Recipe, *, format_: str, fps: int, watch: Watch) -> Result | None:
    """The result on the first rank of the pipeline's mesh, None on others. Every rank of it calls this alike.

    Raises:
        Cancelled: on every rank.
        What the pipeline raises; where arguments are at fault, on every rank.
    """
    mesh = mesh_of(pipe)
    arguments = {
        **call_arguments(request),
        # On the CPU: the same noise whatever the device.
        "generator": torch.Generator().manual_seed(request.seed),
        **_callback(pipe, mesh, watch),
        "output_type": "pil",
    }
    start = time.perf_counter()
    with warnings.catch_warnings():
        # One request of many without guidance, or a size that is rounded, is no news to whoever reads a server's log.
        warnings.simplefilter("ignore")
        made = pipe(**arguments)
    seconds = time.perf_counter() - start
    if mesh is not None and mesh.rank != 0:
        return None
    return Result(
        tuple(encode(made, format_, fps=fps)), {**metadata(pipe, request, recipe, seconds), "size": _size(made)}
    )


def _size(made: Any) -> str:
    """Of the results, which a pipeline rounds to what its model takes."""
    videos = getattr(made, "frames", None)
    first = made.images[0] if videos is None else videos[0][0]
    return f"{first.width}x{first.height}"


def sentence(error: BaseException) -> str:
    """An exception as a user reads it: its text, or its name where it has none or is not one that was raised for users."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror and error.errno is not None:
        file = "" if error.filename is None else f"{error.filename}: "
        return f"{file}{error.strerror}."
    plain = isinstance(error, (ValueError, TypeError, OSError, RuntimeError, ImportError)) and not isinstance(
        error, KeyError
    )
    return text if plain and text else f"{type(error).__name__}: {text}"


def metadata(pipe: Any, request: Request, recipe: Recipe, seconds: float) -> dict[str, Any]:
    """What a result's JSON says of how it came about."""
    return {
        "digest": digest(request, recipe),
        "request": {**request.fields, "seed": request.seed},
        "recipe": recipe.as_json(),
        "pipeline": type(pipe).__name__,
        "mesh": mesh_shape(pipe),
        "cache": None if recipe.cache is None else str(cache_report(pipe)).splitlines(),
        "seconds": round(seconds, 3),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {name: _version(name) for name in ("para_core", "torch", "diffusers")},
    }


def digest(request: Request, recipe: Recipe) -> str:
    """Of what decides a result: while it is the same, a finished one is not made again."""
    return f"{request.digest}{recipe.digest}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # para_core, from a checkout


def _callback(pipe: Any, mesh: GuidedMesh | None, watch: Watch) -> dict[str, Callable[..., Any]]:
    if "callback_on_step_end" not in inspect.signature(original_class(pipe).__call__).parameters:
        return {}

    def at_step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if watch.progress is not None:
            watch.progress(step + 1)
        if watch.cancelled is not None and _agreed(watch.cancelled(), mesh):
            raise Cancelled(f"cancelled after step {step + 1}.")
        return {}

    return {"callback_on_step_end": at_step_end}


def _agreed(stop: bool, mesh: GuidedMesh | None) -> bool:
    """What the first rank says: one byte."""
    if mesh is None:
        return stop
    return bool(broadcast_bytes(torch.tensor([stop], dtype=torch.uint8), mesh)[0])
