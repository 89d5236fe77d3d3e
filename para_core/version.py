"""The version of para_core, and a digest of its source files."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from pathlib import Path

__version__ = "0.1.0"


@cache
def version_and_sources() -> str:
    """Return the version of para_core and a digest of its source files.
    It is equal on hosts with the same code.
    """
    here = Path(__file__).parent
    # In a checkout, these folders are siblings of this one. In an installed package they are inside it.
    parts = ("adapters", "kernels", "fleet", "cli")
    folders = [here, *(here.parent / name for name in parts if not (here / name).is_dir())]
    # Sort by content, because the paths in an installed package differ from those in a checkout.
    digests = sorted(
        blake2b(path.read_bytes()).digest() for folder in folders for path in folder.rglob("*.py")
    )
    return f"{__version__} (sources {blake2b(b''.join(digests), digest_size=6).hexdigest()})"
