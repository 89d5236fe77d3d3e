"""Delete one optional feature in a copy of the repository, and run what is left.

    python -m tests.lift_out                       # all features: imports, and README's main job on two ranks
    python -m tests.lift_out planner               # one feature
    python -m tests.lift_out --together            # all features at once
    python -m tests.lift_out planner --tests       # and the quick tests of everything else

A feature is its own files, one line that registers it, and one line of an ``api.py`` for each of its public names.
Without them every other module must import, and the main job must give the result of one device. The example of the
whole suite is FLUX: ``--tests`` without its family leaves out each file that takes a FLUX from ``tests.tiny``.
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Folders of the repository that hold modules of the library.
ROOMS = ("para_core", "adapters", "kernels", "fleet", "cli")
_SECONDS = 300
# The marks of quick tests, which need no other process.
QUICK = "not ranks and not slow and not long and not nodes and not comfyui"
# An editable installation of this checkout would find what is deleted in a copy. Python runs this at its start if the
# folder of the file is on PYTHONPATH.
_SITE = """\
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "para_core" not in finder.__module__]
"""


@dataclass(frozen=True)
class Feature:
    """An optional feature: what is deleted with it.

    Its public names are the lines of an ``api.py`` that import from its files.

    Args:
        files: Its files and folders, separated by spaces.
        line: The file and the beginning of the line that register it; None if nothing does.
        words: Words, separated by spaces. A quick test whose name, file or parameters contain one is a test of the
            feature, as is every test of a file that imports one of its modules or public names.
    """

    files: str
    line: tuple[str, str] | None = None
    words: str = ""


_MODES = "para_core/modes/__init__.py"
_ATTENTION = "para_core/attention/features.py"
_WEIGHTS = "adapters/weights/features.py"
_BACKENDS = "para_core/option_values.py"
_CACHE = "para_core/cache/__init__.py"
_MODELS = "adapters/models/__init__.py"
# The name of a model family in the table begins with this.
OF_MODELS = "models: "
# The family of README's main job, which runs with another one if this one is deleted, and stays if all are.
_OF_MAIN_JOB = f"{OF_MODELS}flux"


def family(name: str, words: str = "") -> Feature:
    """Return the model family ``name`` as a feature. The names of its tests contain one of its classes or ``words``."""
    file = f"adapters/models/{name}.py"
    classes = re.findall(r'\btransformer="(\w+)"', (ROOT / file).read_text())
    return Feature(file, (_MODELS, f'"{name}",'), words=" ".join([f"every_transformer_of_diffusers {words}", *classes]))


def modules(folder: str, names: str) -> str:
    """Return the files of the modules ``names`` in ``folder``, both separated by spaces."""
    return " ".join(f"{folder}/{name}.py" for name in names.split())


def families() -> tuple[str, ...]:
    """Return the names of all model families. Imports nothing of the library."""
    return tuple(re.findall(r'^    "(\w+)",$', (ROOT / _MODELS).read_text(), re.MULTILINE))


FEATURES: dict[str, Feature] = {
    "FlashAttention's operators": Feature(
        "para_core/modes/flash_attention.py",
        (_MODES, "import para_core.modes.flash_attention"),
        words="_flash_attn_forward test_flash_plans",
    ),
    "flex attention": Feature(
        modules("para_core/modes", "flex_attention flex_errors flex_users block_masks")
        + " para_core/attention/flex_exchange.py",
        (_MODES, "import para_core.modes.flex_attention"),
        words="flex_attention",
    ),
    "F.multi_head_attention_forward": Feature(
        "para_core/modes/multi_head.py", (_MODES, "import para_core.modes.multi_head"), words="multi_head_attention"
    ),
    "checkpoint binding": Feature("para_core/modes/recomputation.py", (_MODES, "import para_core.modes.recomputation")),
    "cache forecasts": Feature(
        "para_core/cache/forecasts.py", (_CACHE, "import para_core.cache.forecasts"), "blocks1-2 test_a_report_is_read"
    ),
    "cache in graphs": Feature(
        modules("para_core/cache", "graph graph_decision call_digest cond"),
        (_CACHE, "import para_core.cache.graph"),
        words="compiled_whole test_third_call_of_a_compiled_model test_policy_reading_numbers",
    ),
    "cache report": Feature(
        "para_core/cache/report.py para_core/cache/call_readings.py adapters/cache/report.py",
        (_CACHE, "import para_core.cache.report"),
    ),
    "ComfyUI nodes": Feature("comfyui_para_core", words="test_comfyui"),
    "gradient of a ring": Feature("para_core/attention/gradients/ring.py"),
    "8-bit exchange": Feature(
        "para_core/attention/rounding.py", (_ATTENTION, '"rounding:Rounding",'), words="comm_dtype test_wire"
    ),
    "Attention2D": Feature(
        ("para_core/attention/grid_2d.py para_core/attention/grid_shape.py para_core/attention/gradients/grid_2d.py"),
        (_BACKENDS, '"2d":'),
        words="grid_2d",
    ),
    "gathered keys": Feature(
        "para_core/attention/gathered.py para_core/attention/gradients/gathered.py", (_BACKENDS, '"gathered":')
    ),
    "block-sparse masks": Feature(
        (
            "para_core/attention/block_sparse.py para_core/attention/direct_ring.py "
            "para_core/attention/gradients/direct_ring.py para_core/modes/block_sparse.py"
        ),
        (_ATTENTION, '"block_sparse:BlockMask",'),
    ),
    "kept keys": Feature(
        "para_core/attention/approximate para_core/attention/kept_keys.py para_core/modes/kept_keys.py",
        (_ATTENTION, '"keys":'),
    ),
    "UNets": Feature(
        "adapters/vae/unet.py adapters/vae/unet_checks.py adapters/models/unets.py adapters/parallel/unet.py",
        ("adapters/denoisers.py", '"para_core.adapters.vae.unet",'),
        words="test_file_of_a_whole test_pipeline_that_cannot_run test_weights_of_a_unet",
    ),
    "rows of VAEs": Feature(
        modules("adapters/vae", "pipeline vae run vae_compile families call_check diffusion_decoder")
        + " para_core/spatial/tiles.py",
        (_WEIGHTS, '"vae":'),
    ),
    "FlashAttention-3": Feature("para_core/attention/backends/flash3.py", (_BACKENDS, '"flash3":')),
    "FlashAttention-4": Feature("para_core/attention/backends/flash4.py", (_BACKENDS, '"flash4":')),
    "SageAttention": Feature("para_core/attention/backends/sage.py", (_BACKENDS, '"sage":'), "test_attention_options"),
    "exact Triton attention": Feature(
        "para_core/attention/backends/triton_exact.py kernels/attention.py",
        (_BACKENDS, '"triton":'),
        words=("[triton test_triton_runs test_launches_with_exact_triton test_rounded_calls_with_kernels"),
    ),
    "int8 attention": Feature(
        ("para_core/attention/backends/triton_int8.py kernels/attention_int8.py kernels/attention_int8_reference.py"),
        (_BACKENDS, '"triton-int8":'),
    ),
    "merge kernel": Feature("kernels/merge.py"),
    "pack kernel": Feature("kernels/pack.py", words="pack_kernel"),
    "residual kernel": Feature("kernels/residual.py"),
    "norm kernel": Feature("kernels/norm.py"),
    "Triton products": Feature(
        "adapters/products.py para_core/products.py kernels/product.py", (_WEIGHTS, '"products":'), words="product"
    ),
    "fsdp": Feature(
        "adapters/weights/fsdp_weights.py para_core/weights/fsdp.py",
        (_WEIGHTS, '"fsdp":'),
        words="by_fsdp_on_tensor_ranks test_parts_of_weights",
    ),
    "tensor": Feature(
        "adapters/weights/tensor_weights.py para_core/weights/tensor.py para_core/weights/tensor_checks.py",
        (_WEIGHTS, '"tensor":'),
    ),
    "stages": Feature(
        "adapters/weights/staged_transformer.py adapters/weights/staged_loras.py para_core/weights/stages.py",
        (_WEIGHTS, '"stages":'),
    ),
    "PipeFusion": Feature(
        "adapters/weights/fused_pipe.py " + modules("para_core/weights", "pipefusion patches patch_hooks stale_keys"),
        (_WEIGHTS, '"pipefusion":'),
        words="compiled_pipefusion under_pipefusion",
    ),
    "text encoder offload": Feature(
        "adapters/weights/text_encoder_offload.py",
        (_WEIGHTS, '"text_encoder_offload":'),
        words="text_encoders_offload text_encoders_first",
    ),
    "VAE offload": Feature(
        "adapters/weights/vae_offload.py",
        (_WEIGHTS, '"vae_offload":'),
        words="vae_placement_offload vae_placement_first test_offloaded_vae_stays",
    ),
    "block offload": Feature(
        "adapters/weights/block_offload.py",
        (_WEIGHTS, '"block_offload":'),
        words="offload_blocks test_each_block_is_copied test_weights_changed_after_a_call",
    ),
    "same bits": Feature("adapters/same_bits.py para_core/same_bits", (_WEIGHTS, '"same_bits":')),
    "quantization": Feature("adapters/weights/quantize.py", (_WEIGHTS, '"quantize":')),
    "CFG over ranks": Feature("adapters/cfg para_core/cfg", (_WEIGHTS, '"cfg":'), words="test_perturbed_attention"),
    "server": Feature("fleet/http cli/serve.py deploy", ("cli/app.py", '"serve": "para_core.cli.serve",'), "[serve_"),
    "planner": Feature(
        "adapters/planner",
        ("adapters/features.py", '"para_core.adapters.planner",'),
        words=(
            "[plan_ and_plans_import test_a_dry_run_shows_what_is_predicted test_line_too_large_for_memory "
            "test_memory_is_weights_plus"
        ),
    ),
    "propose": Feature("adapters/propose", words="is_proposed_on_a_small_copy"),
    "verify": Feature("para_core/verify", ("para_core/call_checks.py", '"verify": "para_core.verify.option",')),
    # The last one, because other features have files in this folder.
    "gradients of attention": Feature(
        "para_core/attention/gradients",
        (_ATTENTION, '"gradients.operator:differentiate",'),
        words="test_the_named_backend_computes_on_one_rank",
    ),
    **{f"{OF_MODELS}{name}": family(name) for name in families()},
    # These tests of commands cache the FLUX in zoo/flux, or predict its memory.
    _OF_MAIN_JOB: family("flux", "test_bad_lines_are_reported test_a_dry_run_shows_what_is_predicted"),
}
TOGETHER = [name for name in FEATURES if name != _OF_MAIN_JOB]
# A test whose file imports one of these is a test of FLUX.
_EXAMPLES = {f"tests.tiny.flux_{name}" for name in ("call", "controlnet", "inputs", "pipe", "transformer")}


@contextmanager
def without(*features: Feature) -> Iterator[Path]:
    """Yield a copy of the repository that lacks ``features``. The copy is deleted at the end of the context."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory(prefix="lift_out_") as folder:
        copy = Path(folder)
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, copy / name)
        (copy / "sitecustomize.py").write_text(_SITE)
        for feature in features:
            remove(feature, copy)
        yield copy


def remove(feature: Feature, folder: Path) -> None:
    """Delete the files and the lines of ``feature`` in ``folder``.

    Raises:
        ValueError: A file or the line of the feature does not exist, or the line is there more than once.
    """
    before = set(module_files(folder))
    for name in feature.files.split():
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()
        else:
            raise ValueError(f"{name} does not exist; correct the table of tests/lift_out.py.")
    gone = before - set(module_files(folder))
    for api in ("para_core/api.py", "adapters/api.py"):
        _keep_lines(folder / api, lambda line: not (line.startswith("from ") and line.split()[1] in gone))
    if feature.line is not None:
        file, line = feature.line
        count = _keep_lines(folder / file, lambda text: not text.strip().startswith(line))
        if count != 1:
            raise ValueError(f"{file}: {count} lines begin with {line!r}; expected one. Correct tests/lift_out.py.")


def _keep_lines(path: Path, is_kept: Callable[[str], bool]) -> int:
    """Delete the other lines of ``path``, and return how many these are."""
    lines = path.read_text().splitlines()
    kept = [line for line in lines if is_kept(line)]
    path.write_text("\n".join(kept) + "\n")
    return len(lines) - len(kept)


def failure_without(*features: Feature, pipe: Any) -> str | None:
    """Return why the repository without ``features`` does not import or run, as a traceback; None if it does.

    Args:
        pipe: What :func:`load_pipe` returned.
    """
    with without(*features) as copy:
        try:
            # This process has imported nothing of para_core, so a fork imports the modules of the copy.
            _fork(_import_and_run, copy, pipe)()
        except RuntimeError as error:
            return str(error)
    return None


def _fork(function: Callable[..., Any], *args: Any, daemon: bool = False) -> Callable[[], None]:
    """Call ``function`` in a fork of this process. Return a function that waits for it, and raises its traceback."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(sender, function, args), daemon=daemon)
    process.start()
    sender.close()

    def wait() -> None:
        try:
            text = receiver.recv() if receiver.poll(_SECONDS) else f"no result within {_SECONDS} s"
        except EOFError:
            text = "the process ended without a result"
        if text is not None:
            process.kill()
            raise RuntimeError(text)
        process.join()

    return wait


def _report(sender: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        function(*args)
    except BaseException:
        sender.send(traceback.format_exc())
    else:
        sender.send(None)


def _import_and_run(copy: Path, pipe: Any) -> None:
    os.chdir(copy)
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("para_core", "tests", "zoo", "benchmarks"):
            del sys.modules[name]
    sys.path.insert(0, str(copy))
    exec((copy / "sitecustomize.py").read_text())
    for name in module_files(copy):
        if name.startswith("para_core") and not name.endswith("__main__"):
            import_module(name)
    call: dict[str, Any] = {"height": 48, "width": 64, "max_sequence_length": 64}
    if not (copy / FEATURES[_OF_MAIN_JOB].files).exists():
        tiny = import_module("zoo.tiny.pipelines").PIPELINES["stable diffusion 3"]
        pipe, call = tiny.build(), tiny.call()
    for wait in [_fork(main_job, rank, copy / "store", pipe, call, daemon=True) for rank in range(2)]:
        wait()


def module_files(folder: Path) -> dict[str, Path]:
    """Return the files of the library and of the ComfyUI nodes in ``folder``, relative to it, by their import names."""
    files = {}
    for room in (*ROOMS, "comfyui_para_core"):
        for path in sorted((folder / room).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            files[".".join(("para_core", *parts) if room in ROOMS[1:] else parts)] = path.relative_to(folder)
    return files


def failing_tests(*features: Feature) -> str | None:
    """Return the output of the quick tests of everything else in a copy without ``features``; None if all pass."""
    with without(*features) as copy:
        gone = importable_names(ROOT) - importable_names(copy)
        if FEATURES[_OF_MAIN_JOB] in features:
            gone |= _EXAMPLES
        while gone:
            gone = _delete_importers(gone, copy)
        words = sorted({word for feature in features for word in feature.words.split()})
        others = " and ".join(f"not {word}" for word in words)
        # The tests of this program read its table, which names the deleted files.
        command = [sys.executable, "-m", "pytest", "-q", "-m", QUICK, "-k", others]
        command += ["-p", "no:cacheprovider", "--ignore=tests/test_lift_out.py"]
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return None
    return run.stdout[-5000:]


def importable_names(folder: Path) -> set[str]:
    """Return the import names of the modules of the library in ``folder``, and of its public names."""
    modules = set(module_files(folder))
    return modules | public_names(modules, folder)


def public_names(modules: set[str], folder: Path = ROOT) -> set[str]:
    """Return the public names that an ``api.py`` in ``folder`` imports from ``modules``, with their package."""
    names = set()
    for package, api in (("para_core", "para_core/api.py"), ("para_core.adapters", "adapters/api.py")):
        for node in ast.parse((folder / api).read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                names |= {f"{package}.{alias.asname or alias.name}" for alias in node.names}
    return names


@cache
def imports_of(path: Path) -> set[str]:
    """Return the modules that a file imports, and what it imports from them: ``a.b`` and ``a.b.c``."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {str(node.module), *[f"{node.module}.{alias.name}" for alias in node.names]}
    return imported


def _delete_importers(gone: set[str], copy: Path) -> set[str]:
    """Delete the files of tests, benchmarks and the zoo that import one of ``gone``. Return their import names."""
    deleted = set()
    for room in ("tests", "benchmarks", "zoo"):
        for path in (copy / room).rglob("*.py"):
            if imports_of(path) & gone:
                deleted.add(".".join(path.relative_to(copy).with_suffix("").parts))
                path.unlink()
    return deleted


def load_pipe() -> Any:
    """Return the pipeline of README's main job. Forks of this process need not import torch and diffusers again."""
    import torch
    from diffusers import FluxPipeline

    # A fork would inherit the locks of other threads, but not the threads.
    torch.set_num_threads(1)
    pipe = FluxPipeline.from_pretrained(ROOT / "zoo/flux/pipeline", dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def main_job(rank: int, store: Path, pipe: Any, call: dict[str, Any]) -> None:
    """Run README's main job on this rank of two: parallelize a small pipeline, without and with a cache, and compare it
    with one device.

    Args:
        call: Arguments of the pipeline's call.

    Raises:
        RuntimeError: The images differ by more than rounding, or a cache skips nothing.
    """
    import torch
    import torch.distributed as dist

    from para_core.adapters import apply_cache_on_pipe, parallelize_pipe

    def draw() -> torch.Tensor:
        options = {"prompt": "a red circle", **call, "num_inference_steps": 2, "output_type": "pt"}
        return pipe(**{**options, "generator": torch.Generator().manual_seed(0)}).images

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


def main() -> int:
    """Lift out the features that the command line names, or all, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", nargs="*", metavar="FEATURE", help="; ".join(FEATURES))
    parser.add_argument("--together", action="store_true", help="delete them all in one copy")
    parser.add_argument("--tests", action="store_true", help="run the quick tests of everything else as well")
    options = parser.parse_args()
    unknown = [name for name in options.features if name not in FEATURES]
    if unknown:
        parser.error(f"unknown feature {unknown[0]!r}; there are {', '.join(FEATURES)}")
    names = options.features or (TOGETHER if options.together else list(FEATURES))
    pipe, failed = load_pipe(), 0
    for group in [names] if options.together else [[name] for name in names]:
        features = [FEATURES[name] for name in group]
        problem = failure_without(*features, pipe=pipe)
        if problem is None and options.tests:
            problem = failing_tests(*features)
        print(f"{', '.join(group)}: {'lifts out' if problem is None else problem}", flush=True)
        failed += problem is not None
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
