"""Run one case on its ranks and on one process without para_core, and judge the results."""

from __future__ import annotations

import re
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map

import para_core
import para_core.adapters
from para_core import PipeFusion
from para_core.adapters import apply_cache_on_pipe, parallelize_pipe, remove_cache_from_pipe, unparallelize_pipe
from tests.rank_pool import RankPool, RankPoolError, heartbeat
from tests.tiny import relative_error
from tests.together import user
from tests.together.options import MESH_DIMS, Case
from tests.together.snapshot import differences, snapshot, tensors_of_ours

# Several ranks sum in another order, which changes a step by 1e-7. The guidance scale and up to eight steps amplify it.
FLOAT32_BOUND = 1e-4
# In bfloat16 both outputs differ by rounding. Another order of sums may increase the error by up to this factor.
BFLOAT16_FACTOR = 2.0
# These options skip two of four steps, whatever the differences are.
_HITS = {"residual_diff_threshold": 1e9, "max_consecutive_hits": 1}
# Each decision must be this far from the threshold, relatively. Closer ones could change with the order of sums.
_CLEAR = 0.02


@dataclass
class Raised:
    """An exception in the form that ranks send to the parent process.

    Args:
        clear: whether it is a ValueError, TypeError or RuntimeError raised by code of para_core.
    """

    kind: str
    message: str
    where: str
    clear: bool
    trace: str


@dataclass
class Reference:
    """The outputs of one process without ranks.

    Args:
        plain: the outputs of the unmodified pipeline.
        expected: the outputs with the case's cache or PipeFusion, which ranks must match; without these, ``plain``.
        precise: the outputs in float32 arithmetic if the case is in bfloat16, else None.
        state: the snapshot of the unmodified pipeline after its calls.
        threshold: the threshold of the cache.
        raised: the error that para_core raised on this one process.
    """

    plain: list[Tensor]
    expected: list[Tensor]
    precise: list[Tensor] | None
    state: dict[str, str]
    threshold: float = 0.0
    raised: Raised | None = None


@dataclass
class Outcome:
    """The verdict on a case.

    Args:
        status: ``exact``, ``refused``, ``wrong``, ``obscure``, ``hang``, or ``alone`` if it fails without para_core
            too.
        detail: the message of the refusal, or a description of the fault.
        error: the largest relative error.
    """

    case: str
    status: str
    detail: str = ""
    error: float = 0.0


def _initial_latents(pipe: Any, case: Case) -> list[Any]:
    """Return the latents that ``prepare_latents`` draws in each call."""
    drawn, draw = [], pipe.prepare_latents

    def prepare(*args: Any, **kwargs: Any) -> Any:
        drawn.append(draw(*args, **kwargs))
        return drawn[-1]

    pipe.prepare_latents = prepare
    try:
        user.generate(pipe, case)
    finally:
        del pipe.prepare_latents
    return drawn


def _in_float32(pipe: Any, case: Case, drawn: list[Any]) -> list[Tensor]:
    """Generate in float32 from latents drawn in bfloat16, because a generator draws other numbers by dtype."""
    left = iter(drawn)

    def prepare(*args: Any, **kwargs: Any) -> Any:
        return tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x, next(left))

    pipe.prepare_latents = prepare
    return user.generate(pipe, case, torch.float32)


def reference(case: Case) -> Reference:
    """Return the outputs of one process, uncompiled."""
    with warnings.catch_warnings(action="ignore"):
        pipe = _untouched(case)
        plain = user.generate(pipe, case)
        result = Reference(plain, plain, None, snapshot(pipe))
        precise = None if case["dtype"] == "float32" else _untouched(case, torch.float32)
        drawn = [] if precise is None else _initial_latents(pipe, case)
        try:
            if case["cache"] in ("hits", "threshold"):
                result.threshold, result.expected = _cached(pipe, case)
                if precise is not None:
                    _apply_cache(precise, case, result.threshold)
            elif case["pipefusion"] != "exact-stages":
                parallelize_pipe(pipe, pipefusion=_pipefusion(case))
                result.expected = user.generate(pipe, case)
                if precise is not None:
                    parallelize_pipe(precise, pipefusion=_pipefusion(case))
        except Exception as error:
            result.raised = described(error)
            return result
        if precise is not None:
            result.precise = _in_float32(precise, case, drawn)
        return result


def _untouched(case: Case, dtype: torch.dtype | None = None) -> Any:
    pipe = user.build(case, dtype)
    user.before(pipe, case)
    user.after(pipe, case)
    user.uncompile(pipe)
    return pipe


def _cached(pipe: Any, case: Case) -> tuple[float, list[Tensor]]:
    """Return a threshold for the cache, and the outputs of one process with it."""
    thresholds = [_HITS["residual_diff_threshold"]] if case["cache"] == "hits" else [0.02 * 1.5**n for n in range(14)]
    for threshold in thresholds:
        _apply_cache(pipe, case, threshold)
        outs = user.generate(pipe, case)
        rows = para_core.adapters.cache_report(pipe).rows
        hits = [row.hit for row in rows]
        margins = [abs(row.difference / threshold - 1) for row in rows if row.difference is not None]
        remove_cache_from_pipe(pipe)
        # The threshold must give both hits and misses in the last call, each with a margin.
        if case["cache"] == "hits" or (any(hits) and min(margins, default=1.0) > _CLEAR):
            return threshold, outs
    raise AssertionError(f"no threshold lets the cache of {case.id} skip")


def _apply_cache(pipe: Any, case: Case, threshold: float) -> None:
    if case["cache"] == "hits":
        apply_cache_on_pipe(pipe, **_HITS)
    elif case["cache"] != "uncached":
        apply_cache_on_pipe(pipe, residual_diff_threshold=0.0 if case["cache"] == "zero" else threshold)


def _pipefusion(case: Case) -> PipeFusion | None:
    patches = {"exact-stages": None, "patches2": 2, "patches3": 3}[case["pipefusion"]]
    return None if patches is None else PipeFusion(patches)


def _mesh(case: Case) -> DeviceMesh | None:
    sizes = case.mesh
    if sizes is None:
        return None
    # Keep the order of init_context_parallel_mesh: ranks of stages are furthest apart, tensor ranks are neighbours.
    ordered = ("pipe", "batch", "ring", "ulysses", "tensor")
    names = [name for name in ordered if sizes[name] > 1 or name in MESH_DIMS[2:4]]
    return init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=tuple(names))


def _parallelize(pipe: Any, case: Case, mesh: DeviceMesh | None) -> None:
    options: dict[str, Any] = {"vae": case["vae"] == "vae", "pipefusion": _pipefusion(case)}
    if case["weights"] != "whole-weights":
        options["weights"] = case["weights"]
    if case["vae placement"] != "auto-vae":
        options["vae_placement"] = case["vae placement"].removeprefix("vae-")
    if case["text"] != "auto-text":
        options["text"] = case["text"].removeprefix("text-")
    if case["rotate"] != "auto-rotate":
        options["rotate_method"] = case["rotate"]
    if case["verify"] == "verify":
        options["verify"] = True
    parallelize_pipe(pipe, mesh=mesh, **options)


def on_ranks(case: Case, threshold: float) -> dict[str, Any]:
    """Generate in parallel, undo everything, and generate again. Return both outputs and what remains, or the error."""
    results: dict[str, Any] = {"stage": "building"}
    pipe = None
    with warnings.catch_warnings(action="ignore"):
        try:
            pipe = user.build(case)
            results["stage"] = "before para_core"
            user.before(pipe, case)
            mesh = _mesh(case)
            results["stage"] = "applying"
            if case["cache order"] == "cache-first":
                _apply_cache(pipe, case, threshold)
            for _ in range(2 if case["undo"] == "again" else 1):
                _parallelize(pipe, case, mesh)
                if case["cache order"] == "cache-last":
                    _apply_cache(pipe, case, threshold)
            results["stage"] = "after para_core"
            user.after(pipe, case)
            heartbeat()
            results["stage"] = "generating"
            results["outs"] = user.generate(pipe, case)
            heartbeat()
            results["kept"] = tensors_of_ours(pipe)
            results["stage"] = "undoing"
            if case.is_one_way:
                require_no_way_back(pipe)
                return results
            _undo(pipe, case)
            user.uncompile(pipe)
            results["state"] = snapshot(pipe)
            results["stage"] = "generating after undo"
            results["undone"] = user.generate(pipe, case)
            results["stage"] = "done"
        except Exception as error:
            results["raised"] = described(error)
            if pipe is not None:
                _try_to_undo(pipe, case, results)
    return results


def require_no_way_back(pipe: Any) -> None:
    """Require that undoing weights in parts raises, and says to load the pipeline again."""
    try:
        unparallelize_pipe(pipe)
    except RuntimeError as error:
        assert "from_pretrained" in str(error), error
        return
    raise AssertionError("unparallelize_pipe undid weights in parts")


def _undo(pipe: Any, case: Case) -> None:
    if case["undo"] == "cache-off-first":
        remove_cache_from_pipe(pipe)
        unparallelize_pipe(pipe)
    else:
        unparallelize_pipe(pipe)
        remove_cache_from_pipe(pipe)


def _try_to_undo(pipe: Any, case: Case, results: dict[str, Any]) -> None:
    """Undo everything after a refusal, and record an error of the undo."""
    if case.is_one_way:
        return
    try:
        _undo(pipe, case)
    except Exception as error:
        results["raised undoing"] = described(error)


_OURS = tuple(str(Path(module.__file__ or "").parent.resolve()) for module in (para_core, para_core.adapters))
_CLEAR_KINDS = (ValueError, TypeError, RuntimeError)
# These words occur in errors of torch itself, which a message of para_core may quote.
_OBSCURE = re.compile(r"aten[.:]|OpOverload|unimplemented operator|torch\._dynamo|[Mm]eta tensor|Traceback|HOP ")


def described(error: BaseException) -> Raised:
    """Return ``error`` in the form that ranks send to the parent, with whether it is a clear refusal."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    ours = str(Path(last.filename).resolve()).startswith(_OURS)
    trace = "".join(traceback.format_exception(error))
    where = f"{Path(last.filename).name}:{last.lineno}"
    clear = type(error) in _CLEAR_KINDS and ours and not _OBSCURE.search(str(error))
    return Raised(type(error).__name__, str(error), where, clear, trace)


def run(case: Case, pool: RankPool) -> Outcome:
    """Run ``case`` on its ranks and on this process, and return the verdict."""
    try:
        alone = reference(case)
    except Exception as error:
        return Outcome(case.id, "alone", f"{type(error).__name__}: {error}")
    if alone.raised is not None:
        return _judge_raised(case, [{"raised": alone.raised, "stage": "on one process"}])
    try:
        results = pool.run(on_ranks, case.ranks, case, alone.threshold, timeout=180.0)
    except RankPoolError as error:
        return Outcome(case.id, "hang", str(error)[-6000:])
    return judge(case, alone, results)


def judge(case: Case, alone: Reference, results: list[dict[str, Any]]) -> Outcome:
    """Return the verdict on the results of all ranks, given those of one process."""
    raised = [result.get("raised") for result in results]
    if any(raised):
        return _judge_raised(case, results)
    problems = []
    largest = 0.0
    for rank, result in enumerate(results):
        outs, undone = result["outs"], result.get("undone")
        problems += [f"rank {rank}: {kept}" for kept in result["kept"]]
        for call, (out, expected) in enumerate(zip(outs, alone.expected, strict=True)):
            error = relative_error(out, expected)
            largest = max(largest, error)
            bound = FLOAT32_BOUND
            if alone.precise is not None:
                bound = BFLOAT16_FACTOR * relative_error(expected, alone.precise[call])
                error = relative_error(out, alone.precise[call])
            if not error <= bound:
                problems.append(f"rank {rank}, call {call}: off by {error:.3g}, bound {bound:.3g}")
            first = results[0]["outs"][call]
            if not _same_bits(out, first):
                problems.append(f"rank {rank}, call {call}: other bits than rank 0, {relative_error(out, first):.3g}")
            if undone is not None and not _same_bits(undone[call], alone.plain[call]):
                error = relative_error(undone[call], alone.plain[call])
                problems.append(f"rank {rank}, call {call}: after undo off by {error:.3g}")
        if undone is not None:
            problems += [f"rank {rank} left: {left}" for left in differences(result["state"], alone.state)[:8]]
    return Outcome(case.id, "wrong" if problems else "exact", "\n".join(problems[:20]), largest)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _judge_raised(case: Case, results: list[dict[str, Any]]) -> Outcome:
    raised: list[Raised | None] = [result.get("raised") for result in results]
    for rank, result in enumerate(results):
        undoing = result.get("raised undoing")
        if undoing is not None and not undoing.clear:
            what = f"{undoing.kind}: {undoing.message}\n{undoing.trace[-3000:]}"
            return Outcome(case.id, "obscure", f"rank {rank} raised undoing: {what}")
    if not all(raised):
        first = next(error for error in raised if error is not None)
        ranks = [rank for rank, error in enumerate(raised) if error]
        return Outcome(case.id, "wrong", f"only ranks {ranks} raised {first.kind}: {first.message}")
    first = next((error for error in raised if error is not None and not error.clear), None)
    stage = results[0]["stage"]
    if first is not None:
        what = f"{first.kind} at {first.where}: {first.message[:1500]}\n{first.trace[-4000:]}"
        return Outcome(case.id, "obscure", f"{stage}: {what}")
    error = raised[0]
    assert error is not None
    return Outcome(case.id, "refused", f"{stage}: {error.kind} at {error.where}: {error.message}")
