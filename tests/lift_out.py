"""Delete one optional feature in a copy of the repository, and run what is left.

    python -m tests.lift_out                       # all features: imports, and README's main job on two ranks
    python -m tests.lift_out planner --tests       # one feature, and the quick tests of everything else

A feature is its own files, one line that registers it, and one line of an ``api.py`` for each of its public names.
Without them every other module must import, and the main job must give the result of one device.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Folders of the repository that hold modules of the library.
_ROOMS = ("para_core", "adapters", "kernels", "fleet", "cli")
_SECONDS = 300


@dataclass(frozen=True)
class Feature:
    """An optional feature: what is deleted with it.

    Args:
        files: Its files and folders.
        line: The file and the line that register it, without indentation; None if nothing does.
        names: Its public names, each a line of ``para_core/api.py`` or ``adapters/api.py``.
        tests: Test files and folders of its own.
        words: A test of another file whose id contains one of these words is a test of the feature too.
    """

    files: tuple[str, ...]
    line: tuple[str, str] | None = None
    names: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


_MODES = "para_core/modes/__init__.py"
_ATTENTION = "para_core/attention/features.py"
_WEIGHTS = "adapters/weights/features.py"
_BACKENDS = "para_core/option_values.py"
_SERVER_TESTS = [
    f"tests/fleet/test_{name}.py"
    for name in ("comfyui", "fields", "host_server", "hostile", "http", "openai", "page", "queue", "server")
]
_CACHE = "para_core/cache/__init__.py"
# Each of these imports several kernels.
_KERNEL_TESTS = tuple(
    f"tests/kernels/test_{name}.py" for name in ("attention", "compiled", "device_tables", "pack", "small_kernels")
)
FEATURES: dict[str, Feature] = {
    "FlashAttention's operators": Feature(
        ("para_core/modes/flash_attention.py",),
        (_MODES, "import para_core.modes.flash_attention"),
        tests=("tests/modes/test_flash_attention.py",),
        words=("flash",),
    ),
    "flex attention": Feature(
        (
            "para_core/modes/flex_attention.py",
            "para_core/modes/flex_errors.py",
            "para_core/modes/flex_users.py",
            "para_core/modes/block_masks.py",
            "para_core/attention/flex_exchange.py",
        ),
        (_MODES, "import para_core.modes.flex_attention"),
        words=("flex", "BlockMask"),
    ),
    "F.multi_head_attention_forward": Feature(
        ("para_core/modes/multi_head.py",), (_MODES, "import para_core.modes.multi_head"), words=("multi_head",)
    ),
    "checkpoint binding": Feature(
        ("para_core/modes/recomputation.py",),
        (_MODES, "import para_core.modes.recomputation  # noqa: F401"),
        words=("checkpoint", "recompute"),
    ),
    "cache forecasts": Feature(
        ("para_core/cache/forecasts.py",),
        (_CACHE, "import para_core.cache.forecasts"),
        tests=("tests/cache/test_options.py", "tests/test_cache_quality.py", "benchmarks/cache"),
        words=("forecast", "foca", "order"),
    ),
    "cache in graphs": Feature(
        (
            "para_core/cache/graph.py",
            "para_core/cache/graph_decision.py",
            "para_core/cache/call_digest.py",
            "para_core/cache/cond.py",
        ),
        (_CACHE, "import para_core.cache.graph"),
        tests=("tests/cache/test_graph.py",),
        words=("compile", "graph"),
    ),
    "cache report": Feature(
        ("para_core/cache/report.py", "para_core/cache/call_records.py", "adapters/cache/report.py"),
        (_CACHE, "import para_core.cache.report  # noqa: F401"),
        names=("CacheReport", "model_cache_report", "cache_report"),
        tests=("tests/cache", "tests/test_cache_quality.py", "benchmarks/cache"),
        words=("report", "cache"),
    ),
    "ComfyUI nodes": Feature(("comfyui_para_core",), tests=("tests/comfyui", "benchmarks/comfyui")),
    "gradients of attention": Feature(
        ("para_core/attention/gradients",),
        line=(_ATTENTION, '"gradients.operator:differentiate",'),
        tests=("tests/attention/test_gradients.py",),
        words=("gradient", "learn", "backward", "grad", "train"),
    ),
    "gradient of a ring": Feature(
        ("para_core/attention/gradients/ring.py",),
        tests=("tests/attention/test_gradients.py",),
        words=("gradient", "learn", "backward", "grad", "train"),
    ),
    "8-bit exchange": Feature(
        ("para_core/attention/rounding.py",),
        line=(_ATTENTION, '"rounding:Rounding",'),
        tests=("tests/attention/approximate/test_wire.py",),
        words=("comm_dtype", "8 bits", "8-bit", "int8", "rounded"),
    ),
    "Attention2D": Feature(
        (
            "para_core/attention/grid_2d.py",
            "para_core/attention/grid_shape.py",
            "para_core/attention/gradients/grid_2d.py",
        ),
        line=(
            "para_core/option_values.py",
            '"2d": RingEntry("grid_2d:Grid2D", takes_wire=False, grid="grid_shape:choose_grid"),',
        ),
        tests=(
            "tests/attention/test_grid_2d.py",
            "tests/planner",
            "tests/cli/test_plan.py",
            "tests/test_expected_traffic.py",
        ),
        words=("2d", "grid", "plan", "foreseen"),
    ),
    "gathered keys": Feature(
        ("para_core/attention/gathered.py", "para_core/attention/gradients/gathered.py"),
        line=(
            "para_core/option_values.py",
            '"gathered": RingEntry("gathered:GatheredKeys", takes_wire=False, keeps_bits=True),',
        ),
        tests=("tests/attention/test_gathered.py", "tests/same_bits/test_pipelines.py"),
        words=("gathered", "same_bits"),
    ),
    "block-sparse masks": Feature(
        (
            "para_core/attention/block_sparse.py",
            "para_core/attention/direct_ring.py",
            "para_core/attention/gradients/direct_ring.py",
            "para_core/modes/block_sparse.py",
        ),
        line=(_ATTENTION, '"block_sparse:BlockMask",'),
        names=("BlockSparseAttnMode",),
        tests=("tests/attention/test_block_sparse.py",),
        words=("block_mask", "block mask", "sparse"),
    ),
    "kept keys": Feature(
        (
            "para_core/attention/approximate",
            "para_core/attention/kept_keys.py",
            "para_core/modes/kept_keys.py",
        ),
        line=(_ATTENTION, '"keys": "kept_keys:KeptKeys",'),
        names=("SparseKVAttnMode", "KeptKeys"),
        tests=("tests/attention/approximate/test_kept_keys.py", "tests/adapters/test_schedule_of_keys.py"),
        words=("kept_keys", "keys", "sparse", "reference_of_an_approximation"),
    ),
    "UNets": Feature(
        ("adapters/vae/unet.py", "adapters/models/unets.py", "adapters/parallel/unet.py"),
        line=("adapters/denoisers.py", '"para_core.adapters.vae.unet",'),
        names=("parallelize_unet", "unparallelize_unet"),
        tests=("tests/spatial/test_unet_pipelines.py",),
        words=("unet",),
    ),
    "rows of VAEs": Feature(
        (
            "adapters/vae/pipeline.py",
            "adapters/vae/vae.py",
            "adapters/vae/vae_compile.py",
            "adapters/vae/families.py",
            "adapters/vae/diffusion_decoder.py",
            "para_core/spatial/tiles.py",
        ),
        line=(_WEIGHTS, '"vae": "vae.pipeline",'),
        names=("parallelize_vae", "unparallelize_vae"),
        tests=(
            "tests/same_bits/test_vaes.py",
            "tests/spatial/test_diffusion_decoder.py",
            "tests/spatial/test_vaes.py",
        ),
        words=("vae",),
    ),
    "Allegro, a model family": Feature(
        ("adapters/models/allegro.py",),
        line=("adapters/models/__init__.py", '"allegro",'),
        words=("allegro", "Allegro"),
    ),
    "FlashAttention-3": Feature(
        ("para_core/attention/backends/flash3.py",),
        (_BACKENDS, '"flash3": AddedBackend("flash3"),'),
        names=("flash_attention_3",),
        tests=("tests/attention/test_libraries.py",),
        words=("flash3", "flash_3", "library", "libraries"),
    ),
    "FlashAttention-4": Feature(
        ("para_core/attention/backends/flash4.py",),
        (_BACKENDS, '"flash4": AddedBackend("flash4"),'),
        names=("flash_attention_4",),
        tests=("tests/attention/test_libraries.py",),
        words=("flash4", "library", "libraries"),
    ),
    "SageAttention": Feature(
        ("para_core/attention/backends/sage.py",),
        (_BACKENDS, '"sage": AddedBackend("sage", is_exact=False),'),
        names=("sage_attention",),
        tests=("tests/attention/test_libraries.py",),
        words=("sage", "library", "libraries", "schedule", "approximat", "backend"),
    ),
    "exact Triton attention": Feature(
        ("para_core/attention/backends/triton_exact.py", "kernels/attention.py"),
        (_BACKENDS, '"triton": AddedBackend("triton_exact"),'),
        tests=(*_KERNEL_TESTS, "tests/attention/test_backend_selection.py"),
        words=("triton", "attention_benchmark", "old_gpus", "cuda_graphs", "signatures", "compiled", "gpu_check"),
    ),
    "int8 attention": Feature(
        (
            "para_core/attention/backends/triton_int8.py",
            "kernels/attention_int8.py",
            "kernels/attention_int8_reference.py",
        ),
        (_BACKENDS, '"triton-int8": AddedBackend("triton_int8", is_exact=False, exact_form="triton"),'),
        tests=_KERNEL_TESTS,
        words=("int8", "schedule", "approximat", "old_gpus", "signatures", "compiled", "gpu_check", "lossy"),
    ),
    "merge kernel": Feature(("kernels/merge.py",), tests=_KERNEL_TESTS, words=("merge", "old_gpus")),
    "pack kernel": Feature(("kernels/pack.py",), tests=_KERNEL_TESTS, words=("pack", "old_gpus")),
    "residual kernel": Feature(
        ("kernels/residual.py",), tests=_KERNEL_TESTS, words=("residual", "forecast", "old_gpus")
    ),
    "norm kernel": Feature(("kernels/norm.py",), tests=_KERNEL_TESTS, words=("norm",)),
    "fsdp": Feature(
        ("adapters/weights/fsdp_weights.py", "para_core/weights/fsdp.py"),
        line=(_WEIGHTS, '"fsdp": "weights.fsdp_weights",'),
        tests=("tests/weights/test_fsdp.py",),
        words=("fsdp",),
    ),
    "tensor": Feature(
        (
            "adapters/weights/tensor_weights.py",
            "para_core/weights/tensor.py",
            "para_core/weights/tensor_checks.py",
        ),
        line=(_WEIGHTS, '"tensor": "weights.tensor_weights",'),
        tests=("tests/weights/test_tensor.py",),
        words=("tensor",),
    ),
    "stages": Feature(
        ("adapters/weights/staged_transformer.py", "para_core/weights/stages.py"),
        line=(_WEIGHTS, '"stages": "weights.staged_transformer",'),
        tests=("tests/weights/test_stages.py",),
        words=("stage",),
    ),
    "PipeFusion": Feature(
        (
            "adapters/weights/fused_pipe.py",
            "para_core/weights/pipefusion.py",
            "para_core/weights/patches.py",
            "para_core/weights/patch_hooks.py",
            "para_core/weights/stale_keys.py",
        ),
        line=(_WEIGHTS, '"pipefusion": "weights.fused_pipe",'),
        names=("pipefusion_report",),
        tests=("tests/weights/test_pipefusion.py",),
        words=("pipefusion", "patch"),
    ),
    "text encoder offload": Feature(
        ("adapters/weights/text_encoder_offload.py",),
        line=(_WEIGHTS, '"text_encoder_offload": "weights.text_encoder_offload",'),
        tests=("tests/weights/test_placement.py",),
        words=("encoder",),
    ),
    "VAE offload": Feature(
        ("adapters/weights/vae_offload.py",),
        line=(_WEIGHTS, '"vae_offload": "weights.vae_offload",'),
        tests=("tests/weights/test_placement.py",),
        words=("vae_placement",),
    ),
    "block offload": Feature(
        ("adapters/weights/block_offload.py",),
        line=(_WEIGHTS, '"block_offload": "weights.block_offload",'),
        tests=("tests/weights/test_placement.py",),
        words=("offload",),
    ),
    "same bits": Feature(
        ("adapters/same_bits.py", "para_core/same_bits"),
        line=(_WEIGHTS, '"same_bits": "same_bits",'),
        tests=("tests/same_bits", "benchmarks/pipelines/same_bits.py"),
        words=("same_bits",),
    ),
    "quantization": Feature(
        ("adapters/weights/quantize.py",),
        line=(_WEIGHTS, '"quantize": "weights.quantize",'),
        tests=("tests/weights/test_quantized_files.py",),
        words=("quantize",),
    ),
    "CFG over ranks": Feature(
        ("adapters/cfg", "para_core/cfg"),
        line=(_WEIGHTS, '"cfg": "cfg.guided_calls",'),
        tests=("tests/cfg", "tests/adapters/test_guidance.py"),
        words=("guidance", "cfg"),
    ),
    "server": Feature(
        ("fleet/http", "cli/serve.py", "deploy"),
        line=("cli/app.py", '"serve": "para_core.cli.serve",'),
        tests=("tests/cli/test_serve.py", "tests/test_deploy.py", *_SERVER_TESTS),
        words=("serve", "server"),
    ),
    "planner": Feature(
        ("adapters/planner",),
        line=("adapters/features.py", '"para_core.adapters.planner",'),
        names=("plan_mesh",),
        tests=(
            "tests/planner",
            "tests/cli/test_plan.py",
            "tests/test_expected_traffic.py",
            "tests/attention/test_grid_2d.py",
        ),
        words=("plan", "foreseen"),
    ),
    "propose": Feature(
        ("adapters/propose",), names=("Proposal", "propose_plan"), tests=("tests/adapters/propose",), words=("propose",)
    ),
    "verify": Feature(
        ("para_core/verify",),
        line=("para_core/call_checks.py", '"verify": "para_core.verify.option",'),
        names=("CheckedCase", "ParallelCheck", "check_parallel"),
        tests=("tests/verify",),
        words=("verify", "verifies", "check_parallel"),
    ),
}


@contextmanager
def without(feature: Feature) -> Iterator[Path]:
    """Yield a copy of the repository that lacks ``feature``. The copy is deleted at the end of the context."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    with tempfile.TemporaryDirectory(prefix="lift_out_") as folder:
        copy = Path(folder)
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, copy / name)
        remove(feature, copy)
        yield copy


def remove(feature: Feature, folder: Path) -> None:
    """Delete the files and the lines of ``feature`` in ``folder``.

    Raises:
        ValueError: A file or a line of the feature does not exist, or a line is there more than once.
    """
    for name in (*feature.files, *feature.tests):
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()
        else:
            raise ValueError(f"{name} does not exist; correct the table of tests/lift_out.py.")
    if feature.line is not None:
        file, line = feature.line
        _delete_line(folder / file, lambda text: text.strip() == line, line)
    for public in feature.names:
        api = [folder / file for file in ("para_core/api.py", "adapters/api.py")]
        ending = f" import {public} as {public}"
        file_of_name = next((path for path in api if ending in path.read_text()), api[0])
        _delete_line(file_of_name, lambda text, ending=ending: text.endswith(ending), ending.strip())


def _delete_line(path: Path, is_searched: Callable[[str], bool], what: str) -> None:
    lines = path.read_text().splitlines()
    matches = [index for index, text in enumerate(lines) if is_searched(text)]
    if len(matches) != 1:
        raise ValueError(f"{path.name} has {len(matches)} lines {what!r}; expected one. Correct tests/lift_out.py.")
    del lines[matches[0]]
    path.write_text("\n".join(lines) + "\n")


def failure_without(feature: Feature, pipe: Any) -> str | None:
    """Return why the repository without ``feature`` does not import or run, as a traceback; None if it does.

    Args:
        pipe: What :func:`load_pipe` returned.
    """
    with without(feature) as copy:
        return _in_fork(_import_and_run, copy, pipe)


def _in_fork(function: Callable[..., Any], *args: Any) -> str | None:
    """Call ``function`` in a fork of this process. Return the traceback of its exception; None if it raises none."""
    # This process has imported torch and diffusers, but nothing of para_core, so a fork imports the copy's modules.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        if not receiver.poll(_SECONDS):
            process.kill()
            return f"no result within {_SECONDS} s"
        text: str | None = receiver.recv()
    except EOFError:
        text = "the process ended without a result"
    process.join()
    return text


def _report(sender: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        function(*args)
    except BaseException:
        sender.send(traceback.format_exc())
    else:
        sender.send(None)


def _import_and_run(copy: Path, pipe: Any) -> None:
    os.chdir(copy)
    _forget_modules()
    sys.path.insert(0, str(copy))
    for name in modules_of(copy):
        import_module(name)
    results = [_start_rank(rank, copy / "store", pipe) for rank in range(2)]
    for receive in results:
        receive()


def _forget_modules() -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("para_core", "tests", "zoo", "benchmarks"):
            del sys.modules[name]


def modules_of(folder: Path) -> list[str]:
    """Return the import names of the library's modules in ``folder`` that need no package beyond the tests' own."""
    names = []
    for room in _ROOMS:
        for path in sorted((folder / room).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            names.append(".".join(parts if room == "para_core" else ("para_core", *parts)))
    return [name for name in names if not name.endswith("__main__")]


def _start_rank(rank: int, store: Path, pipe: Any) -> Callable[[], None]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    context.Process(target=_report, args=(sender, main_job, (rank, store, pipe)), daemon=True).start()
    sender.close()

    def receive() -> None:
        problem = receiver.recv() if receiver.poll(_SECONDS) else f"rank {rank}: no result within {_SECONDS} s"
        if problem is not None:
            raise RuntimeError(problem)

    return receive


def load_pipe() -> Any:
    """Return the pipeline of README's main job. Forks of this process need not import torch and diffusers again."""
    import torch
    from diffusers import FluxPipeline

    # A fork would inherit the locks of other threads, but not the threads.
    torch.set_num_threads(1)
    pipe = FluxPipeline.from_pretrained(ROOT / "zoo/flux/pipeline", dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def main_job(rank: int, store: Path, pipe: Any) -> None:
    """Run README's main job on this rank of two: parallelize a small FLUX, without and with a cache, and compare it
    with one device.

    Raises:
        RuntimeError: The images differ by more than rounding, or a cache skips nothing.
    """
    import torch
    import torch.distributed as dist

    from para_core.adapters import apply_cache_on_pipe, parallelize_pipe

    def draw() -> torch.Tensor:
        options = {"height": 48, "width": 64, "num_inference_steps": 2, "max_sequence_length": 64, "output_type": "pt"}
        return pipe("a red circle", generator=torch.Generator().manual_seed(0), **options).images

    expected = draw()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parallelize_pipe(pipe)
    images = {"two ranks": draw()}
    apply_cache_on_pipe(pipe, compute_steps=[0, 1])
    images["two ranks, with a cache that skips nothing,"] = draw()
    for name, image in images.items():
        error = ((image - expected).norm() / expected.norm()).item()
        if not error < 1e-4:
            raise RuntimeError(f"the image of {name} differs from that of one by {error}; expected less than 1e-4.")
    # The second step is skipped, so the image is another one.
    apply_cache_on_pipe(pipe, compute_steps=[0])
    if torch.equal(draw(), images["two ranks"]):
        raise RuntimeError("a cache that skips a step gave the exact image.")
    dist.barrier()
    dist.destroy_process_group()


def failing_tests(feature: Feature) -> str | None:
    """Return the output of the quick tests in a copy without ``feature``; None if all pass."""
    with without(feature) as copy:
        words = " and ".join(f"not {word}" for word in feature.words)
        quick = "not ranks and not slow and not long and not nodes and not comfyui"
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-m", quick, *(["-k", words] if words else [])],
            cwd=copy,
            capture_output=True,
            text=True,
            check=False,
        )
    return None if run.returncode == 0 else run.stdout[-5000:]


def main() -> int:
    """Lift out the features that the command line names, or all, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", nargs="*", metavar="FEATURE", help="; ".join(FEATURES))
    parser.add_argument("--tests", action="store_true", help="run the quick tests of everything else as well")
    options = parser.parse_args()
    unknown = [name for name in options.features if name not in FEATURES]
    if unknown:
        parser.error(f"unknown feature {unknown[0]!r}; there are {', '.join(FEATURES)}")
    pipe, failed = load_pipe(), 0
    for name in options.features or FEATURES:
        problem = failure_without(FEATURES[name], pipe)
        if problem is None and options.tests:
            problem = failing_tests(FEATURES[name])
        print(f"{name}: {'lifts out' if problem is None else problem}", flush=True)
        failed += problem is not None
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
