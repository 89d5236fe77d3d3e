"""ComfyUI nodes that send requests to ``para_core serve``. Copy this folder into ComfyUI's ``custom_nodes``.

para_core need not be installed there: these files import only the standard library, torch, NumPy and Pillow.
"""

from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
