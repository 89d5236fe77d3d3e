"""The command-line program ``para_core``. Needs the packages of the extra ``cli`` (see setup.py)."""
