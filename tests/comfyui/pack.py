"""The node pack as ComfyUI loads it. Nothing of the server is imported, so tests of ranks run without it."""

import importlib.util
import shutil
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "comfyui_para_core"


def load_nodes(folder):
    """Return the node classes of a copy of the pack in ``folder``/custom_nodes, imported as ComfyUI imports it."""
    folder = shutil.copytree(FOLDER, Path(folder, "custom_nodes", "para-core"))
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    assert module.NODE_CLASS_MAPPINGS.keys() == module.NODE_DISPLAY_NAME_MAPPINGS.keys()
    return module.NODE_CLASS_MAPPINGS
