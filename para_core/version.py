"""Which para_core this is: its release, and of a checkout, which has no release of its own, its sources."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from pathlib import Path

__version__ = "0.1.0"


@cache
def version_and_sources() -> str:
    """The release and a digest of this package's sources: equal on two hosts if they run the same code.

    Adapters and kernels included; in a checkout they stand beside this folder.
    """
    here = Path(__file__).parent
    folders = [here, *(here.parent / name for name in ("adapters", "kernels") if not (here / "adapters").is_dir())]
    # Sorted by content: installed, the same files are in another place.
    found = sorted(blake2b(path.read_bytes()).digest() for folder in folders for path in folder.rglob("*.py"))
    return f"{__version__} (sources {blake2b(b''.join(found), digest_size=6).hexdigest()})"
