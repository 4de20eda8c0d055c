# Everything that a newcomer, a developer and CI run. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
# The torch that development and CI use. Any torch >= 2.7 works: make demo TORCH=torch
TORCH ?= torch==2.13.0
DEMO ?= demo
# Arguments of the conversion benchmark: make bench BENCH='--gib 1 --gib 2 --repeat 5'
BENCH ?=
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

.PHONY: help demo test fast lint format peers gpu-check powercut docs bench clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: $(VENV)/installed ## make a DeepSeek-V4.1-shaped checkpoint, convert it, prove it, show the report
	rm -rf $(DEMO)
	$(BIN)/python -m fse_convert.testing $(DEMO)/checkpoint --kind v4.1-flash --layers 2 --mtp 1 --experts 8
	$(BIN)/fse-convert $(DEMO)/checkpoint $(DEMO)/converted

test: $(VENV)/dev ## all tests, the published peers included (downloads their wheels once)
	$(PYTEST) -n auto

fast: $(VENV)/dev ## tests of this package alone, in about two minutes
	$(PYTEST) -n auto -m 'not slow and not peers'

lint: $(VENV)/dev ## ruff and mypy --strict; linters of the Dockerfile and of the GitHub Action
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile
	$(BIN)/zizmor --offline --quiet action.yml examples/publish-gate.yml

format: $(VENV)/dev ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

peers: $(VENV)/dev ## the published vLLM, SGLang and DeepGEMM code against ours, set up from scratch
	$(BIN)/python tests/peers/wheels.py
	$(BIN)/python tests/peers/make_env.py vllm $(or $(FSE_PEERS_VLLM),.peers/vllm)
	$(BIN)/python tests/peers/make_env.py sglang $(or $(FSE_PEERS_SGLANG),.peers/sglang)
	$(PYTEST) -m peers tests/peers

gpu-check: $(VENV)/dev ## what needs a CUDA device; says what it needs when there is none
	$(PYTEST) -m gpu -rs

powercut: $(VENV)/dev ## 200 power cuts of convert, --overwrite and restore on ext4, XFS and Btrfs; needs root
	FSE_CUTS=200 $(PYTEST) -n auto -m filesystems tests/filesystems/test_power_cuts.py -rs

docs: $(VENV)/dev ## docs/targets.md, docs/codes.md and docs/schema/ from the data, docs/inspect.svg from a real run
	$(BIN)/python docs/make.py

bench: $(VENV)/dev ## conversion and changes of format against cp, proof against cat, workers, memory, planning; needs about 40 GB in the temporary folder
	$(BIN)/python tests/benchmarks/convert.py $(BENCH)
	$(BIN)/python tests/benchmarks/convert.py --folder /dev/shm --gib 2
	$(BIN)/python -m tests.benchmarks.workers
	$(BIN)/python -m tests.benchmarks.recode
	$(BIN)/python tests/benchmarks/verify.py
	$(BIN)/python tests/benchmarks/memory.py
	$(BIN)/python tests/benchmarks/inspect_speed.py
	$(BIN)/python -m tests.benchmarks.plan

clean: ## remove the demo, the virtual environment and the peers
	rm -rf $(DEMO) $(VENV) .peers
