"""Generate many images in a job that survives the loss of a rank.

On each of two hosts, with the first one's name as HOST:

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 --max-restarts=3 \
    parallel_examples/run_elastic.py --output images

If a rank is lost, the generation ends on all ranks (within timeout=), and torchrun restarts them. Images that exist are
not generated again, and none is half-written. Both hosts must see the output folder. Without the exported variable,
restarted ranks may connect to addresses of the ranks before the restart (pytorch/pytorch#135712).
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import FluxPipeline

from para_core.adapters import parallelize_pipe

PROMPTS = ["a large red circle", "a blue square", "a green triangle"]
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev", help="a name on the Hub, or a folder")
parser.add_argument("--size", type=int, default=1024, help="height and width in pixels")
parser.add_argument("--output", type=Path, default=Path("images"), help="a folder that all hosts see")
options = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
dist.init_process_group()
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
pipe = FluxPipeline.from_pretrained(options.model, dtype=dtype).to(device)
parallelize_pipe(pipe, timeout=60)

# All ranks must generate the same images, so rank 0 decides which are missing: on a shared file system, a new file may
# become visible to one host earlier than to another.
options.output.mkdir(exist_ok=True)
missing = [[index for index in range(len(PROMPTS)) if not (options.output / f"{index}.png").exists()]]
dist.broadcast_object_list(missing)
if dist.get_rank() == 0:
    print(
        f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}: images {missing[0]} are to be generated",
        flush=True,
    )
for index in missing[0]:
    generator = torch.Generator().manual_seed(index)
    image = pipe(PROMPTS[index], height=options.size, width=options.size, generator=generator).images[0]
    if dist.get_rank() == 0:
        unfinished = options.output / f"{index}.unfinished"
        image.save(unfinished, format="PNG")
        unfinished.replace(options.output / f"{index}.png")
dist.destroy_process_group()
