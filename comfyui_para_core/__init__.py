"""ComfyUI nodes of para_core. Copy this folder into ComfyUI's ``custom_nodes``.

`loader` runs ComfyUI's own diffusion models on ranks, and needs para_core in the Python of ComfyUI.
`server_nodes` sends requests to ``para_core serve``, and needs only the standard library, torch, NumPy and
Pillow. So nothing here may import para_core, or a module that does, before a node of `loader` is used.
"""

from . import loader, server_nodes

NODE_CLASS_MAPPINGS = {**loader.NODE_CLASS_MAPPINGS, **server_nodes.NODE_CLASS_MAPPINGS}
NODE_DISPLAY_NAME_MAPPINGS = {**loader.NODE_DISPLAY_NAME_MAPPINGS, **server_nodes.NODE_DISPLAY_NAME_MAPPINGS}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
