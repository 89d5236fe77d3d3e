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
_WEIGHTS = "adapters/weights/features.py"
_SERVER_TESTS = [
    f"tests/fleet/test_{name}.py"
    for name in (
        *("aliases", "comfyui", "edits", "host_server", "hostile", "http", "lora_folder", "mounted", "no_effect"),
        *("on_ray", "openai", "openai_on_ray", "page", "pool", "queue", "ray_minute", "seeds", "server", "videos"),
    )
]
FEATURES: dict[str, Feature] = {
    "FlashAttention's operators": Feature(
        ("para_core/modes/flash_attention.py",),
        (_MODES, "import para_core.modes.flash_attention"),
        tests=("tests/modes/test_flash_attention.py",),
        words=("flash",),
    ),
    "flex attention": Feature(
        ("para_core/modes/flex_attention.py", "para_core/modes/block_masks.py", "para_core/attention/flex_exchange.py"),
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
    "ComfyUI nodes": Feature(("comfyui_para_core",), tests=("tests/comfyui", "benchmarks/comfyui")),
    "UNets": Feature(
        ("adapters/vae/unet.py", "adapters/models/unets.py", "adapters/parallel/unet.py"),
        line=("adapters/denoisers.py", '"para_core.adapters.vae.unet",'),
        names=("parallelize_unet", "unparallelize_unet"),
        tests=("tests/spatial/test_unet_pipelines.py",),
        words=("unet",),
    ),
    "Allegro, a model family": Feature(
        ("adapters/models/allegro.py",),
        line=("adapters/models/__init__.py", '"allegro",'),
        words=("allegro", "Allegro"),
    ),
    "norm kernel": Feature(("kernels/norm.py",), tests=("tests/kernels/test_norm.py",), words=("norm",)),
    "fsdp": Feature(
        ("adapters/weights/fsdp_weights.py", "para_core/weights/fsdp.py"),
        line=(_WEIGHTS, '"fsdp": "weights.fsdp_weights",'),
        tests=("tests/weights/test_fsdp.py", "tests/weights/test_fsdp_classes.py"),
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
        tests=("tests/weights/test_pipefusion.py", "tests/weights/test_pipefusion_compiled.py"),
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
        tests=("tests/weights/test_quantized_weights.py", "tests/weights/test_quantized_files.py"),
        words=("quantize",),
    ),
    "CFG over ranks": Feature(
        ("adapters/cfg", "para_core/cfg"),
        line=(_WEIGHTS, '"cfg": "cfg.guided_calls",'),
        tests=("tests/cfg", "tests/adapters/test_guidance.py", "tests/adapters/test_output_form.py"),
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
    """Run README's main job on this rank of two: parallelize a small FLUX, and compare it with one device.

    Raises:
        RuntimeError: The images differ by more than rounding.
    """
    import torch
    import torch.distributed as dist

    from para_core.adapters import parallelize_pipe

    def draw() -> torch.Tensor:
        options = {"height": 48, "width": 64, "num_inference_steps": 2, "max_sequence_length": 64, "output_type": "pt"}
        return pipe("a red circle", generator=torch.Generator().manual_seed(0), **options).images

    expected = draw()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parallelize_pipe(pipe)
    image = draw()
    error = ((image - expected).norm() / expected.norm()).item()
    if not error < 1e-4:
        raise RuntimeError(f"the image of two ranks differs from that of one by {error}; expected less than 1e-4.")
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
