"""Python runs this file at its start if its folder is on PYTHONPATH: it installs the simulated device with torch."""

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec


class _WithTorch(MetaPathFinder):
    """A finder that installs the device right after torch was imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        own = spec.loader.exec_module

        def exec_module(module):
            own(module)
            from tests.simulated_gpu.install import install_in_program

            install_in_program()

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("SIMULATED_GPU"):
    sys.meta_path.insert(0, _WithTorch())
