"""Run the tests that recreate the situations of public reports, and write docs/measured/reports.md.

    python -m benchmarks.reports [--only REFERENCE]

A row is a report about another library, or about a pipeline on several GPUs. Its test recreates the situation on a tiny
model, on CPU ranks with gloo.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal, NamedTuple
from xml.etree import ElementTree

from benchmarks.harness import ROOT, markdown_table, parser_of, read_results, write_results

# "exact": equal to one device. "raises", "warns": on every rank, before or in the first call, with advice. "works": it
# runs, and its promise is checked. "not here": another tool, or not done.
Verdict = Literal["exact", "raises", "warns", "works", "not here"]


class Report(NamedTuple):
    """A public report, and the test that recreates its situation."""

    kind: str
    reference: str  # owner/repository#number
    situation: str  # in our words
    verdict: Verdict
    test: str  # The test is file::function, or empty if there is nothing to run.


PICTURE, SIZE, WAIT, CACHE, CODE, PARTS, DECODE, OWN = (
    "The picture is another one than on one GPU",
    "Sizes and heads that do not divide",
    "It hangs, or ends in a time-out",
    "Caches and guidance",
    "Kernels, hooks and code of the user's own",
    "LoRA, quantized and sharded weights, offload",
    "Decoding",
    "Other libraries' models and training",
)
_MODELS = "tests/adapters/test_transformers.py::test_every_transformer_is_exact_on_two_ranks"
_PIPELINES = "tests/adapters/test_pipelines.py::test_every_pipeline_is_exact"
_RING = "tests/adapters/test_pipelines.py::test_every_pipeline_is_exact_on_a_ring"
_CALLS = "tests/adapters/test_pipelines.py::test_every_kind_of_call_is_exact"
_BYPASS = "tests/plans/test_attention_check.py::test_replaced_sdpa_raises_before_a_pipeline_runs"
_LATE = "tests/distributed/test_late_ranks.py::test_call_on_one_rank_names_the_absent_ranks"
_STEPS = "tests/cache/test_steps.py"

REPORTS = (
    Report(PICTURE, "huggingface/diffusers#12443", "FLUX in pieces that do not fit together", "exact", _PIPELINES),
    Report(
        PICTURE,
        "Tencent-Hunyuan/HunyuanVideo-I2V#35",
        "HunyuanVideo: one rank's part clear, the rest noise",
        "exact",
        _RING,
    ),
    Report(PICTURE, "Wan-Video/Wan2.1#304", "Wan: another motion on 8 GPUs than on one", "exact", _PIPELINES),
    Report(PICTURE, "Wan-Video/Wan2.1#331", "Wan image to video: an artefact in a corner", "exact", _CALLS),
    Report(
        PICTURE,
        "NUS-HPC-AI-Lab/VideoSys#210",
        "CogVideoX: text and video in one sequence, only video is split",
        "exact",
        _MODELS,
    ),
    Report(
        PICTURE,
        "komikndr/raylight#66",
        "Wan 2.2 with two transformers: lines on two GPUs",
        "exact",
        _PIPELINES,
    ),
    Report(PICTURE, "intel/llm-scaler#290", "HunyuanVideo 1.5: black frames on two devices", "exact", _MODELS),
    Report(PICTURE, "huggingface/diffusers#12660", "ChronoEdit: a length that changes in the call", "exact", _MODELS),
    Report(
        PICTURE,
        "huggingface/diffusers#13350",
        "two prompts with one negative prompt, cached",
        "exact",
        "tests/cache/test_flux.py::test_one_negative_prompt_for_two_prompts_equals_two",
    ),
    Report(
        SIZE,
        "deepspeedai/DeepSpeed#5177",
        "a sequence that the ranks do not divide",
        "exact",
        "tests/attention/test_exactness.py::test_any_call_on_any_mesh_equals_one_device",
    ),
    Report(
        SIZE,
        "feifeibear/long-context-attention#154",
        "8,423 tokens",
        "exact",
        "tests/attention/test_exactness.py::test_any_call_on_any_mesh_equals_one_device",
    ),
    Report(
        SIZE,
        "huggingface/diffusers#12536",
        "Wan image to video, quantized, 8 ranks, a size that does not divide",
        "exact",
        _MODELS,
    ),
    Report(SIZE, "vllm-project/vllm-omni#492", "Qwen-Image, a size that the ranks do not divide", "exact", _MODELS),
    Report(SIZE, "xdit-project/xDiT#471", "CogVideoX: padding appears in the result", "exact", _MODELS),
    Report(
        SIZE,
        "Wan-Video/Wan2.1#109",
        "12 heads on 8 ranks of Ulysses",
        "exact",
        "tests/attention/test_exactness.py::test_any_call_on_any_mesh_equals_one_device",
    ),
    Report(
        SIZE,
        "vipshop/cache-dit#546",
        "Z-Image: 30 heads on 4 ranks",
        "exact",
        "tests/adapters/test_transformers.py::test_every_transformer_is_exact_on_four_ranks",
    ),
    Report(
        SIZE,
        "verl-project/verl#1226",
        "more ranks than key heads",
        "exact",
        "tests/attention/test_exactness.py::test_calls_equal_one_device",
    ),
    Report(
        WAIT,
        "xdit-project/xDiT#284",
        "PipeFusion: sends and receives wait for each other",
        "works",
        "tests/weights/test_pipefusion.py::test_ranks_of_a_stage_may_share_each_patch",
    ),
    Report(
        WAIT,
        "xdit-project/xDiT#147",
        "stages: the process stays after the last step",
        "works",
        "tests/weights/test_stages.py::test_stages_are_bit_exact",
    ),
    Report(
        WAIT, "vipshop/cache-dit#761", "FLUX.2, uneven parts: ranks send other sizes than are awaited", "exact", _MODELS
    ),
    Report(WAIT, "huggingface/accelerate#3380", "one rank does not make the call", "warns", _LATE),
    Report(WAIT, "Tencent-Hunyuan/HunyuanVideo#150", "gradio under torchrun: n servers, one port", "not here", ""),
    Report(
        CACHE,
        "vllm-project/vllm-omni#2371",
        "three branches of guidance and two cache states",
        "exact",
        "tests/cache/test_state.py::test_branches_have_separate_states",
    ),
    Report(
        CACHE,
        "sgl-project/sglang#35054",
        "cache state of a branch stays for the next request",
        "exact",
        "tests/cache/test_state.py::test_each_generation_starts_empty_and_frees_its_state",
    ),
    Report(
        CACHE,
        "vllm-project/vllm-omni#4659",
        "a cache around the whole step drops the guidance",
        "exact",
        "tests/cache/test_pipelines.py::test_threshold_0_is_bit_exact_and_removal_restores",
    ),
    Report(
        CACHE,
        "kijai/ComfyUI-KJNodes#242",
        "a step cache of the model on two GPUs gives noise",
        "raises",
        "tests/plans/test_attention_check.py::test_skipped_blocks_name_the_cache_and_not_the_backend",
    ),
    Report(
        CACHE,
        "vipshop/cache-dit#76",
        "a cache breaks the graph",
        "works",
        "tests/cache/test_graph.py::test_cache_has_two_graphs_for_any_threshold",
    ),
    Report(
        CACHE,
        "chengzeyi/Comfy-WaveSpeed#131",
        "compile and cache exclude each other",
        "works",
        "tests/cache/test_graph.py::test_next_cache_of_a_compiled_model_gives_back_its_classes",
    ),
    Report(
        CACHE,
        "vipshop/cache-dit#457",
        "cache and context parallelism, compiled",
        "exact",
        "tests/cache/test_graph.py::test_own_model_under_a_mode_is_cached",
    ),
    Report(
        CACHE,
        "huggingface/diffusers#12760",
        "pipelines that name no branch (img2img, Kontext, inpainting)",
        "exact",
        "tests/cache/test_schedule.py::test_every_pipeline_is_followed_step_by_step",
    ),
    Report(CODE, "woct0rdho/SageAttention#2", "`F.scaled_dot_product_attention = sageattn`", "raises", _BYPASS),
    Report(
        CACHE,
        "huggingface/diffusers#11205",
        "skip-layer guidance in a loop of one's own: a third call per step with the prompt's text",
        "exact",
        f"{_STEPS}::test_third_call_of_a_step_equals_named_one",
    ),
    Report(
        CACHE,
        "chengzeyi/Comfy-WaveSpeed#119",
        "tiles denoised in turn with one text",
        "warns",
        f"{_STEPS}::test_tiles_in_turn_are_computed",
    ),
    Report(
        CACHE,
        "MeiGen-AI/InfiniteTalk#87",
        "three branches, of which a step may leave one out",
        "exact",
        f"{_STEPS}::test_call_that_differs_in_an_attribute_is_computed",
    ),
    Report(
        CODE,
        "huggingface/diffusers#11168",
        "SageAttention in the place of SDPA, for the transformer only",
        "raises",
        "tests/modes/test_handwritten.py::test_replaced_sdpa_is_refused_before_the_model_runs",
    ),
    Report(
        CODE,
        "huggingface/diffusers#8610",
        "a processor that treats tokens by their number",
        "warns",
        "tests/plans/test_foreign_code.py::test_each_kind_of_code_is_named_by_its_place",
    ),
    Report(
        CODE,
        "Fantasy-AMAP/fantasy-talking#52",
        "a model of one's own with a second input that is not split: a mesh in the video",
        "raises",
        "tests/verify/test_verification.py::test_code_that_needs_all_tokens_raises_with_the_first_module",
    ),
    Report(
        PARTS,
        "huggingface/diffusers#9453",
        "a LoRA exchanged in place, on one rank only",
        "raises",
        "tests/adapters/agree/test_state.py::test_differing_models_raise_on_all_ranks",
    ),
    Report(
        PARTS,
        "huggingface/diffusers#9279",
        "LoRAs that come and go, compiled",
        "exact",
        "tests/cache/test_flux.py::test_lora_is_added_and_removed",
    ),
    Report(
        PARTS,
        "Comfy-Org/ComfyUI#5375",
        "a LoRA after compiling has no effect",
        "exact",
        "tests/adapters/test_lora_and_offload.py::test_lora_is_exact_at_every_stage",
    ),
    Report(
        PARTS,
        "NVIDIA-NeMo/Automodel#3157",
        "`fully_shard` after the model was parallelized",
        "exact",
        "tests/weights/test_fsdp.py::test_own_fully_shard_is_parallel_and_exact_in_any_order",
    ),
    Report(
        PARTS,
        "verl-project/verl-omni#59",
        "gradients under sequence parallelism",
        "exact",
        "tests/attention/test_gradients.py::test_gradients_equal_those_of_one_device",
    ),
    Report(
        PARTS,
        "pytorch/pytorch#150711",
        "offload that is switched on and off around a transformer",
        "works",
        "tests/adapters/test_lora_and_offload.py::test_offload_goes_on_and_off_in_every_order",
    ),
    Report(PARTS, "city96/ComfyUI-GGUF#98", "LoRAs on GGUF weights", "exact", "tests/weights/test_quantized_files.py"),
    Report(
        DECODE,
        "huggingface/diffusers#12590",
        "tiles of a VAE on all ranks",
        "exact",
        "tests/spatial/test_vaes.py::test_tiles_on_two_ranks_are_bit_exact",
    ),
    Report(
        DECODE,
        "xdit-project/DistVAE#14",
        "rows of a VAE: sizes that do not divide, halos that are too short",
        "exact",
        "tests/spatial/test_vaes.py::test_few_rows_use_fewer_ranks",
    ),
    Report(
        DECODE,
        "sgl-project/sglang#16510",
        "Wan's VAE with its cache of frames on ranks",
        "exact",
        _CALLS,
    ),
    Report(
        OWN,
        "huggingface/transformers#41297",
        "each rank loads another LoRA by mistake, over sharded weights",
        "raises",
        "tests/weights/test_lora.py::test_different_loras_raise_on_all_ranks",
    ),
)


def run_tests(reports: tuple[Report, ...]) -> dict[str, dict[str, int]]:
    """Run the tests of ``reports``, and return how many cases of each passed and failed."""
    tests = sorted({report.test for report in reports if report.test})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", f"--junitxml={path}"]
        subprocess.run([*command, *tests], cwd=ROOT, check=False)
        cases = list(ElementTree.parse(path).iter("testcase"))
    outcomes: dict[str, dict[str, int]] = {}
    for test in tests:
        file, _, function = test.partition("::")
        module = file.removesuffix(".py").replace("/", ".")
        counts: dict[str, int] = defaultdict(int)
        for case in cases:
            name = case.get("name", "").partition("[")[0]
            if case.get("classname") == module and function in ("", name):
                failed = any(child.tag in ("failure", "error") for child in case)
                counts["failed" if failed else "passed"] += case.find("skipped") is None
        outcomes[test] = {"passed": counts["passed"], "failed": counts["failed"]}
    return outcomes


def parts() -> dict[str, list[str]]:
    """Return the table of docs/measured/reports.md, in which a verdict holds only if all cases of its test passed."""
    outcomes = read_results("reports")["tests"]
    lines: list[str] = []
    for kind in dict.fromkeys(report.kind for report in REPORTS):
        rows = [[report.situation, _link(report.reference), *_today(report, outcomes)] for report in _of(kind)]
        lines += [f"**{kind}**", "", *markdown_table(["situation", "report", "today", "shown by"], rows), ""]
    return {"reports": lines[:-1], "sum": [_sum(outcomes)]}


def _of(kind: str) -> list[Report]:
    return [report for report in REPORTS if report.kind == kind]


def _link(reference: str) -> str:
    repository, _, number = reference.partition("#")
    return f"[{reference}](https://github.com/{repository}/issues/{number})"


def _today(report: Report, outcomes: dict[str, Any]) -> list[str]:
    if not report.test:
        return [report.verdict, ""]
    counts = outcomes[report.test]
    shown = report.test.removeprefix("tests/").replace("_", r"\_")
    return [report.verdict if counts["passed"] and not counts["failed"] else "**FAILS**", shown]


def _sum(outcomes: dict[str, Any]) -> str:
    verdicts = [_today(report, outcomes)[0] for report in REPORTS]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    passed = sum(counts["passed"] for counts in outcomes.values())
    return f"{len(REPORTS)} reports: {counts}. {passed} cases of {len(outcomes)} tests passed."


def main() -> None:
    """Run the tests, and write the results."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", metavar="REFERENCE", help="a part of a reference, such as diffusers#12443")
    only = parser.parse_args().only or ""
    reports = tuple(report for report in REPORTS if only in report.reference)
    outcomes = run_tests(reports)
    if not only:
        write_results("reports", {"tests": outcomes}, "torch", "diffusers", "transformers", "peft")
    for test, counts in outcomes.items():
        print(f"{counts['passed']:4} passed {counts['failed']:4} failed  {test}")


if __name__ == "__main__":
    main()
