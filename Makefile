# The base environment lives in .venv, that of the tests in .venv-dev; `make clean` removes both.

PYTHON ?= python3
BASE := .venv
DEV := .venv-dev
PINS := constraints.txt
NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'

# Many tests start processes, and each would compile every module that it imports.
unexport PYTHONDONTWRITEBYTECODE
# Modules are compiled when they are first imported: most of the 17,000 never are.
INSTALL := $(DEV)/bin/pip install --quiet --no-compile --constraint $(PINS)

# Each worker has a core. It gets tests that follow one another, so that most fixtures are made once,
# and takes some from another worker when it has none left.
TEST := OMP_NUM_THREADS=1 $(DEV)/bin/python -m pytest -n auto --dist worksteal -p no:benchmark

.PHONY: compare test test-all extras transformers check format graphs benchmark clean

compare: $(BASE)/.done
	$(BASE)/bin/python -m experiments.compare_searchers $(ARGS)

test: $(DEV)/.done
	$(TEST) -m "not slow" $(ARGS)

test-all: $(DEV)/.done extras
	$(TEST) $(ARGS)

# Ray, Triton and transformers, which a few tests need: without them those say so, and are left out.
# Ray's are slow ones.
extras: transformers $(DEV)/.ray $(DEV)/.triton

transformers: $(DEV)/.transformers

check: $(DEV)/.done
	$(DEV)/bin/ruff check .
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/mypy
	$(DEV)/bin/lint-imports

format: $(DEV)/.done
	$(DEV)/bin/ruff check --fix .
	$(DEV)/bin/ruff format .

graphs: $(DEV)/.done
	$(DEV)/bin/python -m experiments.build_graphs

# Times what is asked most often, and writes docs/results/speed.md. ARGS='-m "slow or not slow"' times more cases.
benchmark: $(DEV)/.done
	mkdir -p runs
	$(DEV)/bin/python -m pytest benchmarks -m "not slow" --benchmark-timer=time.process_time \
		--benchmark-json=runs/benchmark.json $(ARGS)
	$(DEV)/bin/python -m benchmarks.speed_page runs/benchmark.json

clean:
	rm -rf $(BASE) $(DEV)

$(BASE)/.done: pyproject.toml $(PINS)
	$(NEW_ENOUGH)
	$(PYTHON) -m venv $(BASE)
	$(BASE)/bin/pip install --quiet --constraint $(PINS) --editable .
	touch $@

$(DEV)/.done: pyproject.toml $(PINS)
	$(NEW_ENOUGH)
	$(PYTHON) -m venv $(DEV)
	$(INSTALL) torch==2.13.0
	$(INSTALL) --editable '.[dev]'
	touch $@

$(DEV)/.transformers: $(DEV)/.done
	$(INSTALL) --editable '.[huggingface]'
	touch $@

$(DEV)/.triton: $(DEV)/.done
	$(INSTALL) --editable '.[kernels]'
	touch $@

$(DEV)/.ray: $(DEV)/.done
	$(INSTALL) --editable '.[cluster]'
	touch $@
