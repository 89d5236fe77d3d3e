"""Packaging. The folders adapters/, kernels/, fleet/ and cli/ stand at the top level, but install as parts of
``para_core``.

PyPI has packages named ``kernels`` (which diffusers imports) and ``adapters``; installing ours under those names would
break other people's programs. ``para_core/__init__.py`` and ``kernels/`` (no ``__init__.py``) do the rest of the work;
``tests/test_packaging.py`` proves all of it.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

# A package without __init__.py (kernels/) is not found, so it is named; what lives outside para_core/ gets its prefix
# here.
PACKAGES = [
    *find_packages(include=["para_core", "para_core.*"]),
    *[
        f"para_core.{name}"
        for name in find_packages(include=["adapters", "adapters.*", "fleet", "fleet.*", "cli"])
    ],
    "para_core.kernels",
]

# Address of the repository once it is published (https://github.com/owner/para_core). Metadata links to it then.
REPOSITORY: str | None = None

# Packages of each extra, and what they are for. An extra brings all that its commands need, those of other extras too.
EXTRAS = {
    "diffusers": (
        ["diffusers>=0.42", "transformers", "accelerate", "peft", "sentencepiece", "protobuf"],
        "pipelines, with LoRAs: `para_core.adapters`",
    ),
    "cli": (
        [
            "para_core[diffusers]",
            "typer>=0.15",
            "rich",
            "pydantic>=2.5",
            "pillow",
            "imageio",
            "imageio-ffmpeg",
            "pyyaml",
        ],
        "`para_core generate`, `bench`, `plan`, `doctor`",
    ),
    "fleet": (
        [
            "para_core[cli]",
            "fastapi",
            "fastapi-offline>=1.7",
            "prometheus-client",
            "python-multipart",
            "uvicorn",
        ],
        "`para_core serve`",
    ),
    "ray": (["para_core[fleet]", "ray[serve]>=2.60"], "`serve` and `generate --replicas` on several hosts"),
    "launch": (["cloudpickle>=3"], "`launch` with functions of a script or notebook"),
    "quantize": (["torchao>=0.18", "gguf>=0.10"], "`--quantize`, and GGUF files as `--model`"),
    "triton": (["triton>=3.5"], "the kernels; CUDA builds of torch bring it on Linux"),
    "docs": (["mkdocs-material>=9.6", "mkdocstrings[python]>=0.29"], "`make docs`"),
    "test": (
        [
            "build",
            "cloudpickle>=3",
            "fastapi",
            "fastapi-offline>=1.7",
            "gguf",
            "hypothesis",
            "ipykernel",
            "matplotlib",
            "mypy",
            "nbclient",
            "numpy",
            "openai",
            "peft",
            "pillow",
            "prometheus-client",
            "psutil",
            "pydantic>=2.5",
            "pytest>=8",
            "pytest-xdist",
            "python-multipart",
            "rich",
            "ruff",
            "scikit-image",
            "setuptools>=77",
            "torchao>=0.18",
            "tqdm",
            "triton>=3.5",
            "typer>=0.15",
            "uvicorn",
            "wheel",
        ],
        "`make test`",
    ),
}

_VERSION = re.search(
    r'^__version__ = "(.+)"$', Path(__file__).with_name("para_core").joinpath("version.py").read_text(), re.M
)

setup(
    name="para_core",
    version=_VERSION[1],
    description="Context parallelism and first-block caching for diffusion transformers, without touching model code",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    keywords=["diffusion", "sequence parallelism", "context parallelism", "diffusers", "pytorch"],
    project_urls={
        name: f"{REPOSITORY}{path}"
        for name, path in (
            ("Source", ""),
            ("Documentation", "/blob/main/README.md"),
            ("Changelog", "/blob/main/CHANGELOG.md"),
            ("Issues", "/issues"),
        )
        if REPOSITORY is not None
    },
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=PACKAGES,
    package_dir={
        "para_core": "para_core",
        **{f"para_core.{name}": name for name in ("adapters", "kernels", "fleet", "cli")},
    },
    package_data={
        "para_core": ["py.typed"],
        "para_core.fleet.http": ["page.html", "docs.html"],
        "para_core.adapters.planner": ["*.json"],
    },
    entry_points={"console_scripts": ["para_core = para_core.__main__:main"]},
    install_requires=["torch>=2.11"],
    extras_require={name: packages for name, (packages, _) in EXTRAS.items()},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
