# make setup | demo | test | test-extras | test-postgres | lint | clean: needs Python 3.11 to 3.13; all else goes into .venv.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_ARGS ?= -q -n 2 --dist loadfile

ENVS := .venv-envs

.PHONY: setup demo test test-extras test-postgres lint format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/pip ]; then \
	    for python in python3.11 python3.12 python3.13 python3 python; do \
	        if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; \
	        then $$python -m venv $(VENV) && break; fi; \
	    done; \
	fi
	@if [ ! -x $(BIN)/pip ]; then echo "make setup needs Python 3.11, 3.12 or 3.13"; exit 1; fi
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: setup
	$(BIN)/trireme run

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	scripts/postgres_setup.sh
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS) -m "not large"

# several explorers and trainers on a real PostgreSQL server, some of them killed: minutes
test-postgres: setup
	scripts/postgres_setup.sh
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/buffer tests/e2e/test_postgres.py -m large

# the real ALFWorld engine, in an environment of its own: compiles for about a minute
test-extras: setup test-postgres
	$(BIN)/python -m venv $(ENVS)
	$(ENVS)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev,envs,mcp]'
	OMP_NUM_THREADS=1 $(ENVS)/bin/python -m pytest -q tests/envs tests/workflows tests/e2e/test_seed_000.py

clean:
	rm -rf $(VENV) $(ENVS) build dist *.egg-info .pytest_cache .ruff_cache
