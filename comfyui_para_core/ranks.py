"""The processes that compute one diffusion model: started at its first use, ended by ``close``, started again.

`remote_patcher` makes a :class:`ModelRanks` in ComfyUI's process. Each process holds a
:class:`~.rank_model.RankModel`; para_core.launch starts and calls them. Tests: tests/comfyui/test_pack.py.
"""

from __future__ import annotations

import inspect
import logging
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .settings import Settings

logger = logging.getLogger(__name__)


class ModelRanks:
    """The ranks of one file, which run while ``running`` is True.

    Args:
        path: The file of the model.
        options: Options of ComfyUI's loader, such as the dtype.
        settings: The settings of the node.
        weight_bytes: Estimate of the bytes of weights that each rank holds.
    """

    def __init__(self, path: str, options: Mapping[str, Any], settings: Settings, weight_bytes: int) -> None:
        self.path, self.options, self.settings = path, dict(options), settings
        self.weight_bytes = weight_bytes
        self._handle: Any = None  # of para_core.launch; None while no processes run
        self._patches_uuid: Any = None  # of the LoRAs that the ranks hold; None if that is unknown
        self._device_bytes = 0

    @property
    def running(self) -> bool:
        """Whether the processes run."""
        return self._handle is not None

    @property
    def device_bytes(self) -> int:
        """The bytes that rank 0 holds on its device; 0 if the ranks do not run."""
        return self._device_bytes if self.running else 0

    def start(self, patches: Mapping[str, Any], patches_uuid: Any) -> None:
        """Start the processes if they do not run, and give them the weight patches if these have changed."""
        if self._handle is None:
            from para_core import launch

            logger.info("para_core: starting %d ranks for %s", self.settings.ranks, Path(self.path).name)
            load = _make_load(self.path, self.options, self.settings)
            self._handle, self._patches_uuid = launch(load, ranks=self.settings.ranks, progress=False), None
        if self._patches_uuid != patches_uuid:
            self._call("patch", dict(patches))
            self._patches_uuid = patches_uuid
            self._device_bytes = int(self._call("memory"))

    def forward(self, arguments: Mapping[str, Any], begins_generation: bool) -> Any:
        """Return the output of the model for ``arguments``. Only after :meth:`start`, as :meth:`call_method`.

        ``begins_generation`` says whether this is the first call of a generation.
        """
        output, self._device_bytes = self._call("forward", arguments, begins_generation)
        return output

    def call_method(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of another method of the diffusion model, which reads its weights."""
        return self._call("call_method", name, args, dict(kwargs))

    def close(self) -> None:
        """End the processes, which frees their GPUs. Does nothing if they do not run."""
        handle, self._handle, self._patches_uuid, self._device_bytes = self._handle, None, None, 0
        if handle is not None:
            handle.close()

    def _call(self, method: str, *args: Any) -> Any:
        """Return the first rank's result of a method of :class:`~.rank_model.RankModel`, which all ranks call."""
        from para_core import RankDied

        try:
            return getattr(self._handle, method)(*args)
        except RankDied:
            # The next use starts new processes, which get the patches again.
            self.close()
            raise
        except BaseException:
            # A change of the patches may have failed half-way, so send them again before the next call.
            self._patches_uuid = None
            raise


def _make_load(path: str, options: Mapping[str, Any], settings: Settings) -> Callable[[], Any]:
    """Return the function that loads the model on a rank.

    It is sent by value, so it refers to no global, and imports itself what it needs: a rank finds ComfyUI and
    this folder only after ``sys.path`` and ``sys.modules`` are set.
    """
    import comfy.cli_args
    import comfy.sd

    here, root = str(Path(__file__).parent), str(Path(str(comfy.sd.__file__)).parents[1])
    flags = pickle.dumps((vars(comfy.cli_args.args), dict(options), settings.__dict__))
    paths = [root, *sys.path]

    def load() -> Any:
        import pickle
        import sys
        import types

        sys.path[:0] = [path for path in paths if path not in sys.path]
        # The folder may have a name that is not an identifier, and its __init__ is for ComfyUI's process.
        package = types.ModuleType("comfyui_para_core")
        package.__path__ = [here]
        sys.modules["comfyui_para_core"] = package
        import comfy.cli_args

        arguments, options, settings = pickle.loads(flags)
        # The command-line flags of ComfyUI decide dtypes and devices when its modules are imported.
        vars(comfy.cli_args.args).update(arguments)
        from comfyui_para_core.rank_model import RankModel
        from comfyui_para_core.settings import Settings

        return RankModel(path, options, Settings(**settings))

    return load


def load_diffusion_model(path: str, options: Mapping[str, Any]) -> Any:
    """Return ComfyUI's patcher of the model, which loads all weights at once, as older versions of ComfyUI do."""
    import comfy.sd

    dynamic = {}
    if "disable_dynamic" in inspect.signature(comfy.sd.load_diffusion_model).parameters:
        dynamic["disable_dynamic"] = True
    with torch.inference_mode(False):
        return comfy.sd.load_diffusion_model(path, model_options=dict(options), **dynamic)
