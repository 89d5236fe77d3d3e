"""Functions that ranks run to load a pipeline, pipelines of their own, and their process ids."""

import os
import time
from types import SimpleNamespace

import psutil

SMALL = {"height": 64, "width": 64, "max_sequence_length": 64}
ARGUMENTS = {"prompt": "a red circle", "num_inference_steps": 2, "output_type": "np", **SMALL}


def images(pipe, **arguments):
    """Return the images of a FLUX."""
    return pipe(**{**ARGUMENTS, **arguments}).images


def pids(pipe):
    """Return the process id of each rank."""
    return pipe.run(lambda pipe: os.getpid(), all_ranks=True)


def alive(processes):
    """Return the process ids of processes that run."""
    return [pid for pid in processes if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def require_no_process(processes, seconds=7.0):
    """Raise unless the processes end within ``seconds``."""
    deadline = time.monotonic() + seconds
    while alive(processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(processes) == []


def load_flux():
    """Return the small FLUX, parallel if there are several ranks."""
    import torch
    from diffusers import FluxPipeline

    from para_core.adapters import parallelize_pipe
    from zoo.flux import PIPELINE

    return parallelize_pipe(FluxPipeline.from_pretrained(PIPELINE, dtype=torch.float32))


class Steps:
    """A callable with a progress bar, which waits in its steps."""

    guidance_scale = property(lambda self: self._guidance_scale)

    def __init__(self, decoder_pipe=None):
        self.decoder_pipe = decoder_pipe
        self._guidance_scale = 2.0
        self.notes = []

    def progress_bar(self, iterable=None, total=None):
        raise NotImplementedError("launch replaces this method")

    def __call__(self, count=3, seconds=0.0, before=0.0, after=0.0, callback_on_step_end=None, **tensors):
        time.sleep(before)
        with self.progress_bar(total=count) as bar:
            for step in range(count):
                time.sleep(seconds)
                if callback_on_step_end is not None:
                    tensors = callback_on_step_end(self, step, step, tensors)
                bar.update()
        time.sleep(after)
        return tensors

    def again(self, count, callback_on_step_end=None):
        return self(count, callback_on_step_end=callback_on_step_end)

    def note(self, text):
        """Keep a note on this rank, and return all notes."""
        self.notes.append(text)
        return list(self.notes)

    def this(self):
        return self


def load_steps():
    """Return a :class:`Steps` that has another inside, and one in the blocks of a modular pipeline."""
    pipe = Steps(Steps())
    pipe._blocks = SimpleNamespace(sub_blocks={"denoise": Steps()})
    return pipe


def all_reduce_or_raise(pipe, failing, error):
    """Raise ``error`` on the rank ``failing``, and wait for all ranks on the others."""
    import torch

    if failing in (None, torch.distributed.get_rank()):
        raise error
    torch.distributed.all_reduce(torch.ones(1))


def load_on_a_rank(mark):
    if os.environ.get("PARA_CORE_LAUNCHED_RANK") != mark:
        raise OSError("not on a rank")
    return NotInProcess()


class NotInProcess:
    """An object that only the rank that sends it can load."""

    def __reduce__(self):
        return load_on_a_rank, (os.environ.get("PARA_CORE_LAUNCHED_RANK"),)
