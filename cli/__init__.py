"""The command ``para_core``. Needs the extra ``cli``."""
