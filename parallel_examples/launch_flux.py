"""FLUX.1-dev on several GPUs from one Python process, without torchrun.

python parallel_examples/launch_flux.py --ranks 2
python parallel_examples/launch_flux.py --ranks 2 --model zoo/flux/pipeline --size 128  # on CPUs
"""

import argparse

import torch

from para_core import launch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev", help="a name on the Hub, or a folder")
parser.add_argument("--size", type=int, default=1024, help="height and width in pixels")
parser.add_argument("--ranks", type=int, help="by default one for each GPU")
options = parser.parse_args()


def load():
    """Return the pipeline. Every rank runs this function."""
    from diffusers import FluxPipeline

    from para_core.adapters import parallelize_pipe

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    return parallelize_pipe(FluxPipeline.from_pretrained(options.model, dtype=dtype).to(device))


with launch(load, ranks=options.ranks) as pipe:
    image = pipe(
        "a large red circle in the centre on a white background",
        height=options.size,
        width=options.size,
        num_inference_steps=28,
        generator=torch.Generator().manual_seed(0),
    ).images[0]
image.save("flux.png")
