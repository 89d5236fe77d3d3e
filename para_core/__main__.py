"""The command ``para_core``, also ``python -m para_core``. It calls :mod:`para_core.cli`, which needs the extra
``cli``.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process."""
    try:
        import rich
        import typer
    except ModuleNotFoundError as error:
        sys.exit(f"the command needs {error.name}, which is not installed: pip install 'para_core[cli,diffusers]'.")
    del rich, typer
    from para_core.cli.app import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
