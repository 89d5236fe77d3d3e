"""The attention kernel next to PyTorch's backends on one GPU:  python -m benchmarks.attention.single_device

Measures TFLOP/s, GB/s, milliseconds and the error relative to float64, four continuing calls next to one, and keys of
which half are padding. Writes benchmarks/results/attention.json. ``--tiny --device cpu`` shows that it runs, with
Triton's interpreter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.job import first_line, is_fatal
from benchmarks.gpu.processes import interpreted_on_cpu
from benchmarks.gpu.timing import milliseconds
from benchmarks.harness import RESULTS, environment, parser_of, relative_error

# The differences between the kernels matter, so PyTorch's are measured in the same run.
PYTORCH = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
# This many queries are compared with float64. All queries of a long sequence would need too much memory.
QUERIES_OF_ERROR = 256


@dataclass(frozen=True)
class Size:
    tokens: int
    head_dim: int
    is_causal: bool
    heads: int = 24
    batch: int = 1
    dtype: str = "bfloat16"

    @property
    def flops(self) -> float:
        """Return the floating-point operations of both matrix products, which a causal mask halves."""
        full = 4.0 * self.batch * self.heads * self.tokens**2 * self.head_dim
        return full / 2 if self.is_causal else full

    @property
    def bytes(self) -> int:
        """Return the bytes of query, key, value and out, counted once each."""
        return 4 * self.batch * self.heads * self.tokens * self.head_dim * getattr(torch, self.dtype).itemsize


REAL = tuple(
    Size(tokens, head_dim, is_causal)
    for head_dim in (128, 64, 96, 256)
    for tokens in (4096, 16384, 65536)
    for is_causal in (False, True)
    if tokens < 65536 or head_dim == 128
)
TINY = (Size(40, 16, False, heads=1, dtype="float16"), Size(40, 16, True, heads=1, dtype="float16"))
Ways = dict[str, Callable[[], Tensor]]
WaysOfSize = Callable[[list[Tensor], Size], Ways]


def measure(
    sizes: Sequence[Size], device: torch.device, *, ways: WaysOfSize, enough_time: Callable[[], bool] = lambda: True
) -> Iterator[dict[str, Any]]:
    """Yield a row for each way of each size. A way that refuses a size gives a row with the reason.

    Args:
        enough_time: a function called before each way. If it returns False, the row says so.
    """
    for size in sizes:
        if not enough_time():
            yield {**asdict(size), "way": "all ways", "left out": "out of time"}
            continue
        tensors = make(size, device)
        exact = _exact(tensors, size)
        for name, call in ways(tensors, size).items():
            row = {**asdict(size), "way": name}
            if not enough_time():
                yield {**row, "left out": "out of time"}
                continue
            try:
                out = call()
                times = milliseconds(call, device, repeats=3 if device.type == "cpu" else 10)
            # Triton's own errors are no RuntimeErrors, for example that of a kernel that needs more shared memory than
            # there is.
            except Exception as error:
                if is_fatal(error):
                    raise
                yield {**row, "refused": first_line(error)}
                continue
            seconds = times["ms"] / 1e3
            yield {
                **row,
                **times,
                "TFLOP/s": round(size.flops / seconds / 1e12, 3),
                "GB/s": round(size.bytes / seconds / 1e9, 3),
                "error": _error(out, exact),
            }


def run_way(device: torch.device, size: Size, ways: WaysOfSize, name: str) -> None:
    """Call one way once, which compiles its kernels."""
    ways(make(size, device), size)[name]()


def triton_ways(sizes: Sequence[Size], device: torch.device, ways: WaysOfSize) -> list[tuple[Size, str]]:
    """Return the ways of ``sizes`` that compile a Triton kernel. Nothing is computed."""
    tensor = torch.empty(1, 1, 1, 1, device=device)
    return [(size, name) for size in sizes for name in ways([tensor] * 3, size) if name.startswith("triton")]


def make(size: Size, device: torch.device) -> list[Tensor]:
    """Return query, key and value, ``[B, S, H, D]`` in memory."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (size.batch, size.tokens, size.heads, size.head_dim)
    dtype = getattr(torch, size.dtype)
    return [torch.randn(shape, generator=generator, device=device).to(dtype).transpose(1, 2) for _ in range(3)]


def ways_of(tensors: list[Tensor], size: Size) -> Ways:
    from para_core.kernels import attention_int8
    from para_core.kernels.attention import attention

    query, key, value = tensors
    causal, half = size.is_causal, size.tokens // 2
    ways: Ways = {
        "triton": lambda: attention(query, key, value, is_causal=causal)[0],
        "triton, four continuing calls": lambda: in_four(tensors, is_causal=causal),
        "triton-int8, not exact": lambda: attention_int8.attention(query, key, value, is_causal=causal)[0],
    }
    if not causal:
        ranges = torch.tensor([[[0, half]]], dtype=torch.int32, device=query.device)
        ways["triton, half of the keys padded"] = lambda: attention(query, key, value, key_ranges=ranges)[0]
    return {**ways, **_of_pytorch(tensors, size)}


def _of_pytorch(tensors: list[Tensor], size: Size) -> Ways:
    query, key, value = tensors
    causal = size.is_causal
    if query.device.type == "cpu":
        return {"PyTorch": lambda: F.scaled_dot_product_attention(query, key, value, is_causal=causal)}

    def of_pytorch(backend: SDPBackend) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

        return call

    return {name: of_pytorch(backend) for name, backend in PYTORCH.items()}


def in_four(tensors: list[Tensor], *, is_causal: bool) -> Tensor:
    """Compute attention over four blocks of keys, and merge each with the previous ones, as a rank of a ring of 4
    does.
    """
    from para_core.kernels.attention import attention

    query, key, value = tensors
    so_far, start = None, 0
    for k, v in zip(key.chunk(4, dim=2), value.chunk(4, dim=2), strict=True):
        last = start + k.shape[2] == key.shape[2]
        dtype = query.dtype if last else torch.float32
        so_far = attention(query, k, v, is_causal=is_causal, key_offset=start, so_far=so_far, out_dtype=dtype)
        start += k.shape[2]
    if so_far is None:
        raise ValueError("there are no keys to attend to.")
    return so_far[0]


def _exact(tensors: list[Tensor], size: Size) -> Tensor:
    """Return attention of the last queries in float64, for the first head."""
    query, key, value = (x[:1, :1].double() for x in tensors)
    query = query[:, :, -QUERIES_OF_ERROR:]
    scores = query @ key.mT * size.head_dim**-0.5
    if size.is_causal:
        positions = torch.arange(size.tokens, device=query.device)
        scores = scores.masked_fill(positions > positions[-query.shape[2] :, None], -torch.inf)
    return torch.softmax(scores, -1) @ value


def _error(out: Tensor, exact: Tensor) -> float:
    return relative_error(out[:1, :1, -exact.shape[2] :], exact)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write. Return the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for Triton's interpreter")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(arguments)
    output = args.output or RESULTS / "attention.json"
    if args.device != "cpu" and not torch.cuda.is_available():
        print(
            "benchmarks.attention.single_device needs a CUDA device, and there is none. --tiny --device cpu shows "
            "that it runs."
        )
        return 2
    if args.device == "cpu" and not args.tiny:
        print("On a CPU Triton's interpreter is for tiny sizes only: add --tiny, or name a CUDA device.")
        return 2
    rows, sizes = [], TINY if args.tiny else REAL
    device = torch.device(args.device)
    with interpreted_on_cpu(device):
        for row in measure(sizes, device, ways=ways_of):
            rows.append(row)
            print(json.dumps(row))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"environment": environment("triton"), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
