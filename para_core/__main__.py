"""The command ``para_core``, also ``python -m para_core``. It calls :mod:`para_core.cli`, which needs the extra
``cli``.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process."""
    try:
        from para_core.cli.app import run
    except ModuleNotFoundError as error:
        from para_core.fleet.failures import sentence

        sys.exit(f"error: {sentence(error)}")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
