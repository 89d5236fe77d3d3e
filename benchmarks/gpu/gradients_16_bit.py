"""The memory layout of ``out`` that fused backward kernels assume. Each one gets the same ``out`` in two layouts.

By PyTorch's sources, the memory-efficient backward has no row stride for ``out`` in 16 bits, and reads ``[B, S, H,
D]``. This is a finding, not a verdict: the section ``local`` judges para_core's backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.exact import Inputs, Results, exact, make_inputs
from benchmarks.gpu.job import SectionJob, first_line, is_fatal

# A kernel takes the inputs and a function that changes the layout of `out`. It returns out and the gradients that
# follow from it.
Kernel = Callable[[Inputs, Callable[[Tensor], Tensor]], Results]

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "[B, H, S, D]": Tensor.contiguous,
    "[B, S, H, D]": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
}
NEEDS = {"all kernels": 20.0}  # seconds
# Correct gradients are off by rounding, and wrong ones by their own size.
FAR = 0.05


def run(job: SectionJob) -> None:
    """Run each kernel of the device for each dtype, shape, and layout of ``out`` and of query, key and value."""
    shapes = [(1, 2, 9, 8)] if job.tiny else [(2, 4, 320, 64), (2, 4, 333, 64), (1, 24, 512, 128), (2, 3, 320, 96)]
    kernels = CPU_KERNELS if job.device.type == "cpu" else CUDA_KERNELS
    for name, kernel in kernels.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for shape in shapes:
                expected = exact(make_inputs(shape, dtype, job.device))
                for memory in ("contiguous", "transposed"):
                    inputs = make_inputs(shape, dtype, job.device, memory=memory)
                    for layout, lay_out in LAYOUTS.items():
                        row = {
                            "kernel": name,
                            "dtype": str(dtype).removeprefix("torch."),
                            "shape": shape,
                            "query, key, value": memory,
                            "out": layout,
                        }
                        try:
                            errors = kernel(inputs, lay_out).errors(expected)
                        except (RuntimeError, ValueError) as error:
                            if is_fatal(error):
                                raise
                            job.add(**row, refused=first_line(error))
                            continue
                        far = [x for x in ("dq", "dk", "dv") if not errors[x] < FAR]
                        finding = f"wrong: {', '.join(far)}" if far else "right"
                        job.add(**row, gradients=finding, errors=errors)


aten = torch.ops.aten


def _efficient(inputs: Inputs, lay_out: Callable[[Tensor], Tensor]) -> Results:
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(*inputs.qkv, None, True)
    wanted = [True, True, True, False]
    grads = aten._scaled_dot_product_efficient_attention_backward(
        inputs.grad_out, *inputs.qkv, None, lay_out(out), lse, seed, offset, 0.0, wanted
    )
    return Results(out, *grads[:3])


def _flash(inputs: Inputs, lay_out: Callable[[Tensor], Tensor]) -> Results:
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_flash_attention(*inputs.qkv)
    grads = aten._scaled_dot_product_flash_attention_backward(
        inputs.grad_out, *inputs.qkv, lay_out(out), lse, cum_q, cum_k, max_q, max_k, 0.0, False, seed, offset
    )
    return Results(out, *grads)


def _cudnn(inputs: Inputs, lay_out: Callable[[Tensor], Tensor]) -> Results:
    outputs = aten._scaled_dot_product_cudnn_attention(*inputs.qkv, None, True)
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = outputs
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        inputs.grad_out, *inputs.qkv, lay_out(out), lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, False
    )
    return Results(out, *grads)


def _flash_cpu(inputs: Inputs, lay_out: Callable[[Tensor], Tensor]) -> Results:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*inputs.qkv)
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        inputs.grad_out, *inputs.qkv, lay_out(out), lse, 0.0, False
    )
    return Results(out, *grads)


CUDA_KERNELS: dict[str, Kernel] = {"efficient": _efficient, "flash": _flash, "cudnn": _cudnn}
# The CPU refuses layouts that its kernels do not have.
CPU_KERNELS: dict[str, Kernel] = {"flash": _flash_cpu, "efficient": _efficient}
