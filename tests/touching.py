"""List who imports a file of the library, and its tests: ``python -m tests.touching adapters/vae/unet.py``."""

from __future__ import annotations

import argparse

from tests.lift_out import ROOMS, ROOT
from tests.mutants import module_of, names_module, stages_of


def importers_of(file: str) -> list[str]:
    """Return the files of the library that import ``file``, or name its module in a table of features."""
    paths = (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))
    return [str(path.relative_to(ROOT)) for path in paths if names_module(path.read_text(), module_of(file))]


def main() -> None:
    """Print the importers and the tests of the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="a file of the library, relative to the root")
    options = parser.parse_args()
    print("imported by:", *importers_of(options.file), sep="\n  ")
    for stage, paths, _ in stages_of(options.file, whole=False)[:-1]:
        print(f"tests, {stage}:", *paths, sep="\n  ")


if __name__ == "__main__":
    main()
