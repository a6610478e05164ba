# make demo [HOST=yolo]   set up, then train the host's demo
# make test               set up, then lint, type check and run the tests
# make bench              the benchmarks, as ratios of two things run in turn

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HOST ?= yolo
READY := $(VENV)/.ready

export YOLO_OFFLINE := true
export YOLO_CONFIG_DIR ?= $(CURDIR)/.cache/ultralytics
export HF_HUB_OFFLINE := 1
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/inductor
export MPLBACKEND := agg

.PHONY: demo test lint bench why clean
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python examples/demo.py $(HOST)

test: lint
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/yolo_step.py

why: $(READY)
	$(BIN)/python examples/why.py

clean:
	rm -rf $(VENV) .cache demo build dist
