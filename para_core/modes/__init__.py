"""Torch function modes that intercept attention calls. :mod:`para_core.attention` computes the intercepted
calls.

The lines below register what modes intercept besides ``scaled_dot_product_attention``. Each is optional.
"""

import para_core.modes.flash_attention
import para_core.modes.flex_attention
import para_core.modes.multi_head
import para_core.modes.recomputation  # noqa: F401
