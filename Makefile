# Every command a contributor needs, one word each: `make help`.
# Set CI=true to have missing system packages installed (Debian, root) and to forbid skipped layers.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PY     := $(BIN)/python
# A folder beside the checkout may hold wheels that pip should prefer, such as a CPU build of torch.
FIND_LINKS := $(addprefix --find-links ,$(wildcard ../shared/wheels))
# The same for MNIST's four files, which are downloaded otherwise.
MNIST  := $(addprefix --data-dir ,$(wildcard ../shared/mnist))
NAME   ?= ddpjob
LAYERS ?= lint unit local install apiserver trainer resilience kind
PYTEST := $(BIN)/pytest -q

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-kind demo-down test lint format generate constraints images kind-up kind-down bench bench-local clean \
        test-lint test-unit test-local test-install test-apiserver test-trainer test-resilience test-kind contract soak

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | \
		awk -F'|' '{ printf "  \033[1m%-16s\033[0m %s\n", $$1, $$2 }'

setup: $(VENV)/.installed  ## virtual environment with everything that tests and trainer need

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: set PYTHON=")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { [ "$$CI" = true ] && apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv; } || \
		{ echo "error: $(PYTHON) cannot make virtual environments"; echo "hint:  its ensurepip module is missing"; \
		echo "next:  apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(FIND_LINKS) -c constraints.txt -e '.[trainer,test]'
	@touch $@

demo: setup  ## train MNIST here: two nodes of two processes, no Docker, no cluster
	$(BIN)/ddpjob run manifests/examples/mnist-cpu.yaml --fresh --digits-if-offline $(MNIST)

demo-kind: setup  ## the same on a kind cluster, from nothing to accuracy and checkpoint
	$(PY) -m tests.e2e.demo

demo-down: kind-down  ## remove what demo-kind made

test: setup  ## all test layers: lint, unit, local, install, apiserver, trainer, resilience, kind
	@$(PY) -m tests.layers $(LAYERS)

lint: test-lint  ## ruff, mypy, import-linter, yamllint, helm lint

test-lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p ddpjob -p ddptrain
	$(BIN)/lint-imports
	$(BIN)/yamllint --strict .
	"$$($(PY) -m tests.kind binary helm)" lint --strict charts/ddpjob

test-unit: setup  ## the pure core, in seconds
	$(PYTEST) tests/api tests/engine tests/cluster tests/controller tests/kind -m 'not apiserver and not kind'

test-local: setup  ## whole jobs as processes of this machine, and the command line
	$(PYTEST) tests/local tests/cli

test-install: setup  ## chart, manifests, docs
	$(PYTEST) tests/install -m 'not apiserver and not kind'

test-apiserver: setup  ## operator against a real kube-apiserver and etcd
	$(PYTEST) tests -m apiserver

contract: setup  ## of test-apiserver, the in-memory cluster against a real one by random requests
	$(PYTEST) tests/cluster/contract

test-trainer: setup  ## trainer with gloo at world sizes 1, 2, 3, 4, 7: what it computes
	$(PYTEST) tests/trainer --ignore tests/trainer/resilience

test-resilience: setup  ## the trainer under kills, hangs, signals and power cuts
	$(PYTEST) tests/trainer/resilience

# The figures that the trainer promises, which a test of every day is too short for.
soak: export DDPTRAIN_TEST_KILLS = 20
soak: export DDPTRAIN_TEST_HANG_TIMEOUT = 60
soak: setup  ## the long proofs: twenty kills per rank, hangs with timeouts of the promised size
	$(PYTEST) tests/trainer/resilience/test_kills.py
	$(PYTEST) tests/trainer/resilience/test_hangs.py -k 'what_it_was_doing or across or polls'

test-kind: setup  ## everything on a real kind cluster
	$(PYTEST) tests/e2e -m kind

format: setup  ## format the code and mend what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: setup  ## CRD, chart copy, plain manifests, field reference and diagram from their sources
	$(PY) -m tests.install.generate

constraints: setup  ## pin what is installed now
	@{ head -1 constraints.txt; $(BIN)/pip freeze --exclude-editable | sed -E 's/^(torch==[0-9.]+).*/\1/'; } > constraints.new
	@mv constraints.new constraints.txt

images: setup  ## build ddpjob/operator:dev and ddpjob/trainer:dev
	$(PY) -m tests.kind images

kind-up: setup  ## a kind cluster for development (NAME=ddpjob)
	$(PY) -m tests.kind up --name $(NAME)

kind-down: setup  ## remove that cluster
	$(PY) -m tests.kind down --name $(NAME)

bench-local: setup  ## from ddpjob run to the first training step
	$(PY) -m tests.benchmarks.local_first_step

bench: setup  ## apply → all pods, beside the floor of raw requests
	$(PY) -m tests.benchmarks.apply_to_pods

clean:  ## virtual environment and caches of this checkout
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache operator/ddpjob.egg-info
