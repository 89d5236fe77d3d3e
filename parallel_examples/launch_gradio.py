"""FLUX.1-dev on several GPUs behind a web page, in one Python process.

pip install gradio
python parallel_examples/launch_gradio.py --ranks 2
python parallel_examples/launch_gradio.py --ranks 2 --model zoo/flux/pipeline --size 128  # on CPUs
"""

import argparse

import gradio as gr
import torch

from para_core import Cancelled, launch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev", help="a name on the Hub, or a folder")
parser.add_argument("--size", type=int, default=1024, help="height and width in pixels")
parser.add_argument("--ranks", type=int, help="by default one for each GPU")
parser.add_argument("--port", type=int, default=7860)
options = parser.parse_args()


def load():
    """Run on every rank."""
    from diffusers import FluxPipeline

    from para_core.adapters import parallelize_pipe

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    return parallelize_pipe(FluxPipeline.from_pretrained(options.model, dtype=dtype).to(device))


def generate(prompt, steps, progress=gr.Progress()):  # noqa: B008 (gradio reads the default)
    """Return the image. Requests of several visitors run one after another."""

    def report(pipe, step, timestep, tensors):
        progress((step + 1, int(steps)))
        return tensors

    try:
        return pipe(
            prompt,
            height=options.size,
            width=options.size,
            num_inference_steps=int(steps),
            callback_on_step_end=report,
            callback_on_step_end_tensor_inputs=[],
        ).images[0]
    except Cancelled:
        raise gr.Error("stopped") from None


with launch(load, ranks=options.ranks) as pipe, gr.Blocks() as page:
    prompt, steps, image = gr.Textbox("a red circle"), gr.Number(28, label="steps"), gr.Image()
    gr.Button("Generate").click(generate, [prompt, steps], image, api_name="generate", concurrency_limit=4)
    gr.Button("Stop").click(pipe.cancel, api_name="stop")
    page.launch(server_port=options.port)
