# make demo [HOST=yolo]   set up, then train the host's demo
# make test               set up, then lint, type check and run the tests
# make test-long          kills, random settings and label files by the thousand; the counts stand in BENCHMARKS.md
# make test-oldest        the part of the tests in tests/oldest.txt, at the oldest versions, in an environment of its own
# make bench [ROWS=...]   the benchmarks: ratios of things run in turn, into benchmarks/results.json and BENCHMARKS.md

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HOST ?= yolo
PROCESSES ?= auto
READY := $(VENV)/.ready

export YOLO_OFFLINE := true
export YOLO_CONFIG_DIR ?= $(CURDIR)/.cache/ultralytics
export HF_HUB_OFFLINE := 1
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/inductor
export MPLBACKEND := agg

OLDEST := .venv-oldest
OLDEST_READY := $(OLDEST)/.ready
OLDEST_PYTHON ?= $(shell python3.10 -c 'import sys; print(sys.executable)' 2>/dev/null || echo $(PYTHON))

.PHONY: demo test test-long test-oldest lint bench why clean
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python examples/demo.py $(HOST)

test: lint
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile

test-long: $(READY)
	$(BIN)/python -m pytest -m long --numprocesses $(PROCESSES) --timeout 3600

$(OLDEST_READY): pyproject.toml constraints-oldest.txt
	$(OLDEST_PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[test]'
	touch $(OLDEST_READY)

test-oldest: export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/.cache/inductor-oldest
test-oldest: export YOLO_CONFIG_DIR := $(CURDIR)/.cache/ultralytics-oldest
test-oldest: $(OLDEST_READY)
	mkdir -p $(YOLO_CONFIG_DIR)
	$(OLDEST)/bin/python -m pytest --numprocesses $(PROCESSES) --dist loadfile @tests/oldest.txt

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks $(ROWS)

why: $(READY)
	$(BIN)/python examples/why.py

clean:
	rm -rf $(VENV) $(OLDEST) .cache demo build dist
