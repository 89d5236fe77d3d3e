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
    *[f"para_core.{name}" for name in find_packages(include=["adapters", "adapters.*", "fleet", "fleet.*", "cli"])],
    "para_core.kernels",
]

_VERSION = re.search(
    r'^__version__ = "(.+)"$', Path(__file__).with_name("para_core").joinpath("version.py").read_text(), re.M
)

setup(
    name="para_core",
    version=_VERSION[1],
    description="Context parallelism and first-block caching for diffusion transformers, without touching model code",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=PACKAGES,
    package_dir={
        "para_core": "para_core",
        **{f"para_core.{name}": name for name in ("adapters", "kernels", "fleet", "cli")},
    },
    package_data={"para_core": ["py.typed"], "para_core.fleet": ["page.html"]},
    entry_points={"console_scripts": ["para_core = para_core.__main__:main"]},
    install_requires=["torch>=2.11"],
    extras_require={
        "diffusers": ["diffusers>=0.42", "transformers", "accelerate", "sentencepiece", "protobuf"],
        "cli": ["typer>=0.15", "rich", "pydantic>=2.5"],
        "fleet": ["ray[serve]>=2.60", "typer>=0.15", "rich"],
        "calibrate": ["matplotlib", "scikit-image", "tqdm"],
        "triton": ["triton>=3.5"],
        "docs": ["mkdocs-material>=9.6", "mkdocstrings[python]>=0.29"],
        "test": [
            "build",
            "fastapi",
            "hypothesis",
            "matplotlib",
            "mypy",
            "numpy",
            "peft",
            "pillow",
            "prometheus-client",
            "psutil",
            "pydantic>=2.5",
            "pytest>=8",
            "pytest-xdist",
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
    },
    classifiers=[
        "Intended Audience :: Developers",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
