"""Nodes of ComfyUI that call a server of ``para_core serve``. Copy this folder into ``custom_nodes``.

ComfyUI needs no para_core: these files import the standard library, torch, NumPy and Pillow only.
"""

from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
