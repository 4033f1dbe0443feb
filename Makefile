# Two commands do everything on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints/cpu.txt
READY := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: venv demo demo-vlm test soak lint clean
venv: $(READY)

$(READY): setup.py pyproject.toml $(CONSTRAINTS) $(wildcard csrc/*.cpp csrc/*.h csrc/cpu/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) pip setuptools wheel pybind11 torch
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) --no-build-isolation -e '.[demo,dev]' av
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) --no-deps torchvision
	touch $@

demo: venv
	$(BIN)/headrace train configs/demo.yaml

demo-vlm: venv
	$(BIN)/headrace train configs/demo_vlm.yaml

test: venv
	$(BIN)/python -m pytest

soak: venv
	$(BIN)/python -m pytest -m soak

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy engine kernels bench

clean:
	rm -rf build dist *.egg-info $(VENV)
