# The environment of the tests lives in .venv-dev; `make clean` removes it.

PYTHON ?= python3
DEV := .venv-dev
PINS := constraints.txt

.PHONY: test check format graphs benchmark clean

test: $(DEV)/.done
	$(DEV)/bin/python -m pytest $(ARGS)

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

benchmark: $(DEV)/.done
	$(DEV)/bin/python -m pytest benchmarks $(ARGS)

clean:
	rm -rf $(DEV)

$(DEV)/.done: pyproject.toml $(PINS)
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(DEV)
	$(DEV)/bin/pip install --quiet --constraint $(PINS) torch==2.13.0
	$(DEV)/bin/pip install --quiet --constraint $(PINS) --editable '.[dev]'
	touch $@
