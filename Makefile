# Everything that a newcomer, a developer and CI run. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
# The torch that development and CI use. Any torch >= 2.7 works: make demo TORCH=torch
TORCH ?= torch==2.13.0
DEMO ?= demo
NFS := $(VENV)/nfs
# The folder outside of the checkout where `make release-check` tries a release
RELEASE ?= /tmp/fse-convert-release
# What `make test-lowest` runs, and how long `make fuzz` spends on each of its seven targets and `make statemachine` in all
TESTS ?= tests
FUZZ_SECONDS ?= 514
MACHINE_MINUTES ?= 30
# Arguments of the conversion benchmark: make bench BENCH='--gib 1 --gib 2 --repeat 5'
BENCH ?=
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

.PHONY: help demo test fast test-lowest lint format release-check peers gpu-check powercut nfs statemachine mutations rows fuzz docs bench clean

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
	@echo "fse-convert is $(BIN)/fse-convert here"

test: $(VENV)/dev ## all tests, the published peers included (downloads their wheels once)
	$(PYTEST) -n auto

fast: $(VENV)/dev ## tests of this package alone, in about two minutes
	$(PYTEST) -n auto -m 'not slow and not peers'

$(VENV)-lowest/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet --no-deps $(TORCH) uv
	VIRTUAL_ENV=$(VENV)-lowest $(VENV)-lowest/bin/uv pip install --quiet --resolution lowest-direct --editable '.[hub,test]'
	touch $@

test-lowest: $(VENV)-lowest/installed ## the fast tests with the lowest versions that pyproject.toml allows, torch aside
	$(VENV)-lowest/bin/python -m pytest -n auto -m 'not slow and not peers' $(TESTS)

lint: $(VENV)/dev ## ruff and mypy --strict; linters of the Dockerfile and of the GitHub Action; dependencies, and dist/sbom.cdx.json
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile
	$(BIN)/zizmor --offline --quiet action.yml examples/publish-gate.yml
	$(BIN)/python -m pip check
	mkdir -p dist
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file dist/sbom.cdx.json $(BIN)/python

release-check: $(VENV)/dev ## build wheel and sdist, and try both outside of the checkout: files, demo, tests; dist/sbom.cdx.json
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/release.py dist $(RELEASE) '$(TORCH)'

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

nfs: $(VENV)/installed ## every command over NFS 4.2 and 3, alone and beside a second client; needs root and user-mode-linux
	rm -rf $(NFS)
	$(BIN)/python -m fse_convert.testing $(NFS) --kind v4.1-flash --layers 3 --mtp 1 --experts 8 --hidden 512 --width 384
	tests/filesystems/nfs/run.sh $(BIN)/fse-convert $(NFS)
	rm -rf $(NFS)

powercut: $(VENV)/dev ## 200 power cuts of convert, --overwrite and restore on ext4, XFS and Btrfs; needs root
	FSE_CUTS=200 $(PYTEST) -n auto -m filesystems tests/filesystems/test_power_cuts.py -rs

statemachine: $(VENV)/dev ## commands in any order, killed anywhere, for MACHINE_MINUTES
	FSE_MACHINE_MINUTES=$(MACHINE_MINUTES) $(PYTEST) -rP tests/faults/test_machine.py

mutations: $(VENV)/dev ## more than 5,000 single changes of outputs of every kind of change, proved against the source
	FSE_MUTATION_SEEDS=2 $(PYTEST) -n auto -rP tests/verification/test_mutations.py tests/verification/test_changed_mutations.py

rows: $(VENV)/dev ## every key and name of every family's row taken out, misnamed or swapped: some test must see each
	$(BIN)/python -m tests.model.families.mutants

fuzz: $(VENV)/dev ## an hour of atheris over what is read: headers, checkpoints, commands, the serving loaders
	$(BIN)/python -m pip install --quiet atheris
	for target in header checkpoint inspect convert verify restore serve; do \
	  $(BIN)/python -m tests.fuzz $$target .fuzz/$$target -max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=4096 || exit 1; \
	done

docs: $(VENV)/dev ## docs/targets.md, docs/codes.md and docs/schema/ from the data, docs/inspect.svg from a real run
	$(BIN)/python -m docs.make

bench: $(VENV)/dev ## conversion and changes of format against cp, proof against cat, workers, memory, planning; needs about 40 GB in the temporary folder
	$(BIN)/python tests/benchmarks/convert.py $(BENCH)
	$(BIN)/python tests/benchmarks/convert.py --folder /dev/shm --gib 2
	$(BIN)/python -m tests.benchmarks.workers
	$(BIN)/python -m tests.benchmarks.recode
	$(BIN)/python tests/benchmarks/verify.py
	$(BIN)/python tests/benchmarks/memory.py
	$(BIN)/python tests/benchmarks/inspect_speed.py
	$(BIN)/python -m tests.benchmarks.plan

clean: ## remove the demo, the virtual environments, what was built and fuzzed, and the peers
	rm -rf $(DEMO) $(VENV) $(VENV)-lowest dist .fuzz .peers
