"""List who imports a file of the library, and its tests: ``python -m tests.touching adapters/vae/unet.py``."""

from __future__ import annotations

import argparse
import re
from importlib.util import resolve_name
from pathlib import Path

from tests.lift_out import ROOT, module_files
from tests.mutants import module_of, names_module, stages_of


def importers_of(file: str) -> list[str]:
    """Return the files of the library that import ``file``, or name its module in a table, such as ``FAMILIES``."""
    module, files = module_of(file), module_files(ROOT).values()
    return [str(path) for path in files if names_module(source_of(path), module) or lists_module(path, module)]


def lists_module(path: Path, module: str) -> bool:
    """Whether a file of the library imports modules of a package by their names there, and has that of ``module``."""
    source = (ROOT / path).read_text()
    for prefix in re.findall(r'import_module\(f"([\w.{}]+?)\.\{', source):
        package = prefix.replace("{__name__}", module_of(str(path)))
        if module.startswith(f"{package}.") and re.search(rf'"{module.removeprefix(f"{package}.")}[":]', source):
            return True
    return False


def source_of(path: Path) -> str:
    """Return the source of a file of the library, with absolute names in place of those of relative imports."""
    package, source = module_of(str(path.parent)), (ROOT / path).read_text()
    return re.sub(r"(?m)(?<=from )\.+[\w.]*(?= import )", lambda name: resolve_name(name[0], package), source)


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
