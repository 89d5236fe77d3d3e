"""Many images, by a job that may lose a rank. On each of two hosts, HOST being the first one:

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 --max-restarts=3 \
    parallel_examples/run_elastic.py --output images

A rank that is lost ends the generation on all (within timeout=), and torchrun starts all of them again. Images that are there are not generated
again, and none is half-written. The folder is one that both hosts see. Without the variable, ranks that are started again may read addresses of
those before them (pytorch/pytorch#135712).
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import FluxPipeline

from para_core.adapters import parallelize_pipe

# Trained for para_core's own checkout, and found there alone: elsewhere --model is required.
TINY = Path(__file__).absolute().parent.parent / "zoo/flux/pipeline"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--model", default=TINY, required=not TINY.exists(), help="a folder or a name on the Hub; left out: a tiny FLUX"
)
parser.add_argument("--prompts", nargs="+", default=["a large red circle", "a small blue square", "a green triangle"])
parser.add_argument("--output", type=Path, default=Path("images"))
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--size", type=int, default=128, help="height and width in pixels")
parser.add_argument("--max-sequence-length", type=int, default=64, help="text tokens")
options = parser.parse_args()

# What cannot run ends here, before anything is loaded.
for name in ("steps", "size", "max_sequence_length"):
    if getattr(options, name) < 1:
        parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; expected a positive integer")
if options.size % 16:
    parser.error(f"--size is {options.size}; expected a multiple of 16")
if "RANK" not in os.environ:  # set by torchrun
    parser.error("it needs ranks: torchrun --nproc_per_node=N …, one rank per GPU")
try:
    options.output.mkdir(exist_ok=True)
except OSError as error:
    parser.error(f"--output is {options.output}; expected a folder: {error}")
if not os.access(options.output, os.W_OK):
    parser.error(f"--output is {options.output}; it cannot be written to")

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
dist.init_process_group()
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
is_first = dist.get_rank() == 0
pipe = FluxPipeline.from_pretrained(options.model, dtype=dtype).to(device)
pipe.set_progress_bar_config(disable=not is_first)
parallelize_pipe(pipe, timeout=60)

# All ranks generate what the first one misses: a shared folder may show a file on one host earlier than on the other.
missing = [[name for name in range(len(options.prompts)) if not (options.output / f"{name}.png").exists()]]
dist.broadcast_object_list(missing)
if is_first:
    print(
        f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}: images {missing[0]} are to be generated",
        flush=True,
    )
for name in missing[0]:
    image = pipe(
        options.prompts[name],
        height=options.size,
        width=options.size,
        num_inference_steps=options.steps,
        max_sequence_length=options.max_sequence_length,
        generator=torch.Generator(device).manual_seed(name),
    ).images[0]
    if is_first:
        unfinished = options.output / f"{name}.unfinished"
        image.save(unfinished, format="PNG")
        unfinished.replace(options.output / f"{name}.png")
dist.destroy_process_group()
