# Every target sets up .venv by itself, on a machine that has Python >= 3.11 and nothing else.
#
#   make demo       see it work: the same image from one process and from several, and with a cache
#   make check      lint, types, and the quick tests of one process (two minutes)
#   make test       lint, types, and the tests, with a sample of the cases of large matrices (10 to 20 minutes on two CPU cores)
#   make test-long  every case of every test, with Inductor everywhere and more examples
#   make test-nodes  2 and 3 hosts × 2 ranks, as network namespaces (Linux, root), under torchrun; loopback addresses elsewhere
#   make test-fleet all tests of replicas, of the server and of the command, on Ray (a minute of them is in make test)
#   make test-comfyui  the node pack in ComfyUI itself: COMFYUI=its folder; COMFYUI_PYTHON=a Python with its requirements
#   make comfyui-zip  build/comfyui_para_core.zip, to unpack into ComfyUI's custom_nodes
#   make docs       the site, in build/site, from its own extra; links are checked
#   make bench      measure, and write benchmarks/results/
#   make gpu-check  what only a GPU can tell, in at most 30 minutes; takes a Python whose torch has CUDA as it is (docs/install.md)
#   make lint types the parts of `make test` that need no run

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# What pytest gets in addition: make test PYTEST="-k ring -x"
PYTEST ?=
# Two tests at once, each with rank processes of its own: while one waits for its ranks or compiles, another computes.
AT_ONCE := -n 2 --dist worksteal
# What the check gets: make gpu-check GPU_CHECK="--minutes 9", then GPU_CHECK="--minutes 4 --resume"
GPU_CHECK ?=

.DEFAULT_GOAL := help
.PHONY: help demo check test test-long test-nodes test-fleet test-comfyui comfyui-zip pytest lint types bench gpu-check docs clean
# Lint, then types, then tests, one after the other: the tests meet time-outs and want both cores.
.NOTPARALLEL:

help:
	@sed -n 's/^#   //p' Makefile

demo: $(STAMP)
	@echo "==> demo"
	$(BIN)/python -m benchmarks.demo

check: lint types
	@echo "==> tests of one process"
	$(BIN)/python -m pytest -m "not ranks and not slow and not long and not nodes and not comfyui" $(AT_ONCE) $(PYTEST)

test: lint types
	@echo "==> tests"
	$(BIN)/python -m pytest $(AT_ONCE) $(PYTEST)

test-long: lint types
	@echo "==> tests, the long ones too"
	$(BIN)/python -m pytest -m "not nodes and not comfyui" --hypothesis-profile=long $(AT_ONCE) $(PYTEST)

test-nodes: $(STAMP)
	@echo "==> tests on several hosts"
	$(BIN)/python -m pytest -m nodes $(PYTEST) tests/nodes

# Where to find ComfyUI, and the Python that has its requirements and para_core; .venv, if it has them.
COMFYUI ?=
COMFYUI_PYTHON ?= $(BIN)/python

test-comfyui: $(STAMP)
	@echo "==> tests in ComfyUI"
	@[ -f "$(COMFYUI)/main.py" ] || { echo "COMFYUI is '$(COMFYUI)'; expected the folder of ComfyUI, which has main.py: make test-comfyui COMFYUI=path"; exit 1; }
	COMFYUI="$(abspath $(COMFYUI))" COMFYUI_PYTHON="$(abspath $(COMFYUI_PYTHON))" $(BIN)/python -m pytest -m comfyui $(PYTEST) tests/comfyui

comfyui-zip:
	@mkdir -p build && rm -f build/comfyui_para_core.zip
	@git archive --format=zip --output build/comfyui_para_core.zip HEAD comfyui_para_core
	@echo "build/comfyui_para_core.zip"

# One at a time: each has rank processes on both cores.
test-fleet: $(STAMP)
	@echo "==> tests of the fleet"
	$(BIN)/python -m pytest -m "long or not long" tests/fleet tests/cli $(PYTEST)

lint: $(STAMP)
	@echo "==> lint"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.docstrings

# mypy knows no package_dir, so it is shown the installed shape (git ignores build/).
types: $(STAMP)
	@echo "==> types"
	@mkdir -p build/types/para_core
	@for folder in adapters kernels fleet cli; do ln -sfn ../../../$$folder build/types/para_core/$$folder; done
	$(BIN)/mypy

# What mkdocs says of links, anchors and pages without a place is an error. Builds offline, once it is installed.
docs: $(STAMP)
	@$(BIN)/python -c 'import mkdocs, material, mkdocstrings' 2>/dev/null || { echo "==> installing mkdocs into $(VENV)" && \
	  $(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[docs]'; }
	@echo "==> the site"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html; with search: $(BIN)/python -m http.server --directory build/site"

bench: $(STAMP)
	@echo "==> benchmarks"
	$(BIN)/python -m benchmarks

# Where a GPU is, its own torch fits its driver and there may be no package index: nothing is installed if $(PYTHON) was
# named, or has a torch built for CUDA.
gpu-check:
	@echo "==> gpu-check"
	@if [ "$(origin PYTHON)" != file ] || $(PYTHON) -c 'import torch; assert torch.version.cuda' 2>/dev/null; then \
	  python="$(PYTHON)"; \
	else \
	  echo "$(PYTHON) has no torch built for CUDA: taking $(VENV)" && \
	  $(MAKE) --no-print-directory $(STAMP) && python="$(BIN)/python"; \
	fi && PYTHONPATH=".$${PYTHONPATH:+:$$PYTHONPATH}" "$$python" -m benchmarks.gpu $(GPU_CHECK)

clean:
	@echo "==> removing what make and the tools left here (.venv stays: rm -r .venv)"
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

# The stamp is newer than what it was made from, so repeating installs nothing. setuptools first, pinned: the build of
# para_core itself then needs no second download (--no-build-isolation). pip compiles packages with one core, so
# compileall does it, with all cores. It fails for the files of torch that need a newer Python, which nothing imports.
$(STAMP): setup.py constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"para_core needs Python >= 3.11; $(PYTHON) is {v[0]}.{v[1]}. Name another one: make PYTHON=python3.12 ...")' && \
	  echo "==> creating $(VENV)" && $(PYTHON) -m venv $(VENV); }
	@echo "==> installing para_core, PyTorch, diffusers, Ray and the test tools into $(VENV) (once; minutes if nothing is cached)"
	$(PIP) install --quiet --no-compile -c constraints.txt setuptools wheel
	$(PIP) install --quiet --no-compile -c constraints.txt --no-build-isolation -e '.[diffusers,ray,test]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@
