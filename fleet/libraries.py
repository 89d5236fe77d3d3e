"""Messages of the libraries below this package, which commands (`cli/`) and ranks (`rank.py`, `engine.py`) hide."""

from __future__ import annotations

import logging
import threading
import warnings

# Libraries whose log messages advise on settings that the command chooses, and not its user.
LIBRARIES = ("accelerate", "diffusers", "huggingface_hub", "peft", "torch", "torchao", "transformers")


def quiet(debug: bool) -> None:
    """Hide the progress bars of diffusers and transformers, and unless ``debug``, the warnings of all
    libraries.
    """
    from diffusers.utils import logging as diffusers_logging
    from tqdm import tqdm
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    # tqdm's default lock is a system semaphore. If a signal ends a rank, Python warns that the semaphore
    # leaked.
    tqdm.set_lock(threading.RLock())
    if not debug:
        for name in LIBRARIES:
            logging.getLogger(name).setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
