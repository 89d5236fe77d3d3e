"""Entry point of the command ``para_core`` and of ``python -m para_core``.

The command line itself is in :mod:`para_core.cli`, which needs the extra ``cli`` (in a checkout:
``pip install '.[cli]'``).
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, and exit with its exit code."""
    try:
        from para_core.cli.app import run
    except ModuleNotFoundError as error:
        from para_core.fleet.failures import sentence

        sys.exit(f"error: {sentence(error)}")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
