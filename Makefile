# Needs Python 3.10+, make and the package registry; everything else is set up in .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH := .venv-bench
LOWEST := .venv-lowest
LATEST := .venv-latest
STAMP := $(VENV)/.ready
export OMP_NUM_THREADS ?= 1
GATE := $(BIN)/python tests/gate.py

.PHONY: help setup train test test-system test-lowest test-latest style lint settings parity models checkpoints memory offload reliability bench bounds clean

help: ## Show what can be made
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## Make .venv with the pinned versions

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	# torch by its pin and alone first: a range would select the largest build the registry has
	$(BIN)/python -m pip install --quiet $$(grep -E '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet -c constraints.txt "setuptools>=77" wheel "hatchling>=1.27"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,examples]'
	touch $@

train: setup ## Train a small GPT under zero3 on two CPU processes (about two minutes)
	$(BIN)/lightning-zero fit experiment=main_job

style: setup ## Ruff and the rules of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

lint: style ## The same and mypy, as CI runs them
	$(BIN)/mypy

# mypy takes a minute where it has no cache, so it runs beside the tests. Files are dealt out to the two processes in this
# order, the short ones last, so that both end together.
test: style ## Lint, types and the tests of every change: each package, both engines, each kind of module (four minutes)
	@echo '$(BIN)/mypy, beside the tests'; $(BIN)/mypy & types=$$!; \
	$(GATE) --no-loadscope-reorder tests/distributed tests/unit tests/gpu; tests=$$?; \
	wait $$types || { echo 'mypy has found errors, see above'; exit 1; }; exit $$tests

test-system: setup ## Commands as typed, faults, SLURM, several nodes, what compiles (ten minutes)
	$(GATE) --timeout 180 tests/system

# For another set of versions, without this package's own bounds: what a release may break, and its row of docs/versions.md
define try
	$(1)/bin/python -m pip install --quiet $$(grep -E '^pytest' constraints.txt)
	$(1)/bin/python -m pip install --quiet --no-deps -e .
	$(1)/bin/python benchmarks/versions.py docs/versions.md
endef

# torch has no small CPU build of other versions in every registry: then its CUDA libraries come along, 5 GB.
test-lowest: ## The lowest versions that pyproject.toml admits (5 GB)
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	sed -nE 's/^    "([a-z-]+)>=([0-9.]+)[,"].*/\1==\2/p' pyproject.toml > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet -r $(LOWEST)/lowest.txt
	$(call try,$(LOWEST))

test-latest: ## The newest versions that the registry has (5 GB)
	test -x $(LATEST)/bin/python || $(PYTHON) -m venv $(LATEST)
	sed -nE 's/^    "([a-z-]+)>=([0-9.]+)[,"].*/\1/p' pyproject.toml > $(LATEST)/latest.txt
	$(LATEST)/bin/python -m pip install --quiet --upgrade -r $(LATEST)/latest.txt
	$(call try,$(LATEST))

parity: setup ## Write docs/parity.md and docs/hsdp.md
	$(BIN)/python benchmarks/parity.py > docs/parity.md.new && mv docs/parity.md.new docs/parity.md
	$(BIN)/python benchmarks/parity.py --ranks 4 --shard-size 2 > docs/hsdp.md.new && mv docs/hsdp.md.new docs/hsdp.md

# Without their dependencies: some ask for torchvision, whose wheel on the package index is compiled for CUDA. Of that one
# only the Python part is used, from a folder of its own, as transformers could not be imported beside it.
models: setup ## Write the second table of docs/parity.md: public models and optimizers beside DDP
	$(BIN)/python -m pip install --quiet -c constraints.txt $$($(BIN)/python benchmarks/models.py --requirements needed)
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt $$($(BIN)/python benchmarks/models.py --requirements models)
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt --upgrade --target $(VENV)/python-only torchvision
	$(BIN)/python benchmarks/models.py

checkpoints: setup ## Write the tables of docs/checkpoints.md (half an hour)
	$(BIN)/python benchmarks/checkpoints.py memory
	$(BIN)/python benchmarks/checkpoints.py moves
	$(BIN)/python benchmarks/checkpoints.py groups

settings: setup ## Write docs/settings.md
	$(BIN)/python benchmarks/settings.py > docs/settings.md.new && mv docs/settings.md.new docs/settings.md

memory: setup ## Write docs/memory.md
	$(BIN)/python benchmarks/memory.py > docs/memory.md.new && mv docs/memory.md.new docs/memory.md

offload: setup ## Write the tables of docs/offload.md
	$(BIN)/python benchmarks/offload.py docs/offload.md

reliability: setup ## Write the table of docs/reliability.md and, where there is a SLURM, the requeued job's log and plot
	$(BIN)/python benchmarks/faults.py docs/reliability.md
	$(BIN)/python benchmarks/requeue.py docs

# In an environment with what the package needs and no more: Lightning imports matplotlib and transformers where they are
# installed, and their memory would be counted as ours.
$(BENCH)/.ready: pyproject.toml constraints.txt
	test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet $$(grep -E '^torch==' constraints.txt)
	$(BENCH)/bin/python -m pip install --quiet -c constraints.txt "setuptools>=77" wheel "hatchling>=1.27"
	$(BENCH)/bin/python -m pip install --quiet -c constraints.txt -e . accelerate
	$(BENCH)/bin/python -m pip install --quiet -c constraints.txt --target $(BENCH)/accelerate transformers
	touch $@

bench: $(BENCH)/.ready ## Write docs/speed.md: every way to run the same step, side by side (80 minutes)
	$(BENCH)/bin/python benchmarks/bench.py

bounds: $(BENCH)/.ready ## Measure what docs/speed.md has bounds for, and nothing else (40 minutes)
	$(BENCH)/bin/python benchmarks/bench.py --bounds

clean: ## Remove the environment and what runs have written
	rm -rf $(VENV) $(BENCH) $(LOWEST) $(LATEST) build dist *.egg-info outputs multirun lightning_logs
