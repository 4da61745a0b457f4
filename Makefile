# The base environment lives in .venv, that of the tests in .venv-dev, and a pip of known version, which
# checks the pins, in .venv-pins; `make clean` removes them.

PYTHON ?= python3
BASE := .venv
DEV := .venv-dev
PINNING := .venv-pins
PINS := constraints.txt
# TORCH_INDEX=URL takes torch from another package index. PyTorch's own index of builds for CPUs is the
# one that its installation page names for Linux, pip and CPU.
TORCH_INDEX ?=
TORCH := torch==2.13.0
# GB that the tests' environment downloads, by `make pins`, which fails when they are untrue: on Linux
# torch brings CUDA along, on macOS and Windows it does not. With a build for CPUs Linux has 3.1 GB less
# the 2.7 of torch and CUDA, and that build's 0.2.
GB_WITH_CUDA := 3.1
GB_WITHOUT := 0.45
GB_CPU_BUILD := 0.5
NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'

# Many tests start processes, and each would compile every module that it imports.
unexport PYTHONDONTWRITEBYTECODE
# Modules are compiled when they are first imported: most of the 17,000 never are. The pip that comes
# with Python 3.11 takes twice the CPU seconds of the pinned one to choose among files of the index.
INSTALL := $(DEV)/bin/pip install --quiet --no-compile --constraint $(PINS)

# Each worker has a core. It gets tests that follow one another, so that most fixtures are made once,
# and takes some from another worker when it has none left.
TEST := OMP_NUM_THREADS=1 $(DEV)/bin/python -m pytest -n auto --dist worksteal -p no:benchmark

.PHONY: compare test test-all slow extras transformers docs pages pins check format graphs stubs benchmark clean

compare: $(BASE)/.done
	$(BASE)/bin/python -m experiments.compare_searchers $(ARGS)

test: $(DEV)/.done
	$(TEST) -m "not slow" $(ARGS)

test-all: $(DEV)/.done extras
	$(TEST) $(ARGS)

# The slow tests alone, file by file; stopped, it goes on where it was. Writes runs/slow/tests.md.
slow: $(DEV)/.done extras
	$(DEV)/bin/python -m benchmarks.slow_tests $(ARGS)

# Ray, Triton, transformers and Megatron-core, which a few tests need: without them the tests are left
# out, and the summary says so.
extras: $(DEV)/.extras

transformers: $(DEV)/.transformers

check: $(DEV)/.done
	$(DEV)/bin/ruff check .
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/mypy
	$(DEV)/bin/mypy .ci/pins.py
	$(DEV)/bin/lint-imports

# The documentation as a site, in site/: it needs no network to build or to read.
docs: $(DEV)/.done
	NO_MKDOCS_2_WARNING=1 $(DEV)/bin/mkdocs build --strict $(ARGS)

# Result pages again, each by the command that it names; ARGS='motivation ladder' makes these alone.
pages: $(DEV)/.done
	$(DEV)/bin/python -m benchmarks.result_pages $(ARGS)

# Whether the pins resolve on machines that are not this one. ARGS=--everywhere: beyond Linux too.
pins: $(PINNING)/.done
	$(PINNING)/bin/python .ci/pins.py $(ARGS)

format: $(DEV)/.done
	$(DEV)/bin/ruff check --fix .
	$(DEV)/bin/ruff format .

graphs: $(DEV)/.done
	$(DEV)/bin/python -m experiments.build_graphs

# What type checkers read of classes that are made from tables; to be written again when a row changes.
stubs: $(DEV)/.done
	$(DEV)/bin/python -m benchmarks.stubs

# Times what is asked most often, and writes docs/results/speed.md. ARGS='-m "slow or not slow"' times more cases.
benchmark: $(DEV)/.done
	mkdir -p runs
	$(DEV)/bin/python -m pytest benchmarks -m "not slow" --benchmark-timer=time.process_time \
		--benchmark-json=runs/benchmark.json $(ARGS)
	$(DEV)/bin/python -m benchmarks.speed_page runs/benchmark.json

clean:
	rm -rf $(BASE) $(DEV) $(PINNING)

$(BASE)/.done: pyproject.toml $(PINS)
	$(NEW_ENOUGH)
	$(PYTHON) -m venv $(BASE)
	$(BASE)/bin/pip install --quiet --constraint $(PINS) --editable .
	touch $@

$(DEV)/.done: pyproject.toml $(PINS)
	$(NEW_ENOUGH)
ifneq ($(TORCH_INDEX),)
	@echo "Downloads about $(GB_CPU_BUILD) GB, a torch for CPUs among them."
else ifeq ($(shell uname -s),Linux)
	@echo "Downloads up to $(GB_WITH_CUDA) GB: the package index's torch for Linux brings CUDA along."
	@echo "With 'make TORCH_INDEX=URL ...' it is about $(GB_CPU_BUILD) GB, where URL is PyTorch's index of builds for CPUs"
	@echo "(its installation page names the URL for Linux, pip and CPU)."
else
	@echo "Downloads about $(GB_WITHOUT) GB, torch among them."
endif
	$(PYTHON) -m venv $(DEV)
	$(INSTALL) --upgrade pip
	$(if $(TORCH_INDEX),$(INSTALL) --no-deps --index-url $(TORCH_INDEX) $(TORCH))
	$(INSTALL) --editable '.[dev]'
	touch $@

$(PINNING)/.done: $(PINS)
	$(NEW_ENOUGH)
	$(PYTHON) -m venv $(PINNING)
	$(PINNING)/bin/pip install --quiet --no-compile --constraint $(PINS) --upgrade pip
	touch $@

$(DEV)/.transformers: $(DEV)/.done
	$(INSTALL) --editable '.[huggingface]'
	touch $@

# One call: each builds the package and resolves all pins, for 6 CPU seconds even where nothing is new.
$(DEV)/.extras: $(DEV)/.done
	$(INSTALL) --editable '.[huggingface,kernels,megatron,cluster]'
	touch $@ $(DEV)/.transformers
