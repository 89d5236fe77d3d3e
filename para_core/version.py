"""The version of para_core, and a digest of its sources."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from pathlib import Path

__version__ = "0.1.0"


@cache
def version_and_sources() -> str:
    """Return the version and a digest of the sources, adapters and kernels included. It is equal on two hosts that run
    the same code.
    """
    here = Path(__file__).parent
    # In a checkout the folders adapters/ and kernels/ are next to this one.
    folders = [here, *(here.parent / name for name in ("adapters", "kernels") if not (here / "adapters").is_dir())]
    # Sorted by content, because the paths of an installed package differ from those of a checkout.
    digests = sorted(blake2b(path.read_bytes()).digest() for folder in folders for path in folder.rglob("*.py"))
    return f"{__version__} (sources {blake2b(b''.join(digests), digest_size=6).hexdigest()})"
