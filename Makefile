# The commands for contributors; `make help` lists them.
# CI=true installs missing system packages (Debian, root), and a skipped test fails its layer.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PY     := $(BIN)/python
# MNIST's four files; the demo downloads what is missing.
MNIST  := $(or $(abspath $(wildcard ../shared/mnist)),$(or $(DDPJOB_CACHE),$(HOME)/.cache/ddpjob)/mnist)
# pip shows its progress on a terminal only.
QUIET  := $(if $(MAKE_TERMOUT),,--quiet)
PIP_INSTALL = $(BIN)/pip install $(QUIET) --disable-pip-version-check --no-deps
NAME   ?= ddpjob
ALL_LAYERS := lint unit local install apiserver ddprun ddptrain lessons kind
LAYERS ?= $(ALL_LAYERS)
LAYER_TARGETS := $(ALL_LAYERS:%=test-%)
# Built for `make soak` only.
GANGS := kube-apiserver-1.36 kube-controller-manager-1.36 kube-scheduler-1.36 coscheduling coscheduling-controller
PYTEST := $(BIN)/pytest -q

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-kind demo-down test prepare lint format generate pictures lock images kind-up \
        kind-down bench bench-local gpu clean $(LAYER_TARGETS) contract mutants soak

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | \
		awk -F'|' '{ printf "  \033[1m%-16s\033[0m %s\n", $$1, $$2 }'

setup: $(VENV)/.installed  ## create the virtual environment with everything that tests and trainer need

# The demos need no tests and no linters.
DEMO := $(or $(wildcard $(VENV)/.installed),$(VENV)/.trainer)
DISTRIBUTIONS := operator/ddpjob operator/ddpjob_operator trainer_app/ddprun trainer_app/ddpplot trainer_app/ddptrain
# A CPU build of torch in a folder of wheels; torch of the package index needs CUDA's libraries on Linux, too.
TORCH_CPU = $(firstword $(wildcard $(addsuffix /torch-*+cpu-cp$(shell $(PYTHON) -c \
	'import sys; print(*sys.version_info[:2], sep="")')-*.whl,../shared/wheels $(PIP_FIND_LINKS))))
CPU_INDEX = $(findstring whl/cpu,$(PIP_EXTRA_INDEX_URL) $(PIP_INDEX_URL))
LOCKS = build operator trainer plot $(if $(TORCH_CPU)$(CPU_INDEX),,torch cuda)
$(VENV)/.installed: LOCKS += test
$(VENV)/.installed $(VENV)/.trainer: $(addsuffix /pyproject.toml,$(DISTRIBUTIONS)) $(wildcard requirements/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: set PYTHON=")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { [ "$$CI" = true ] && apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv; } || \
		{ echo "error: $(PYTHON) cannot create virtual environments"; echo "hint:  its module ensurepip is missing"; \
		echo "next:  apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo 'Installing PyTorch and what else requirements/ names into $(VENV). Up to 3 GB are downloaded; this takes minutes.'
	@# The lock files are complete, so pip has nothing to resolve.
	$(PIP_INSTALL) --require-hashes $(patsubst %,--requirement requirements/%.txt,$(LOCKS))
	@# Without the index, because pip prefers a file there to one of a folder.
	$(if $(TORCH_CPU),$(PIP_INSTALL) --no-index --find-links $(dir $(TORCH_CPU)) --require-hashes --requirement requirements/torch.txt)
	@# By version, because the lock has the hashes of few CPU builds.
	$(if $(TORCH_CPU),,$(if $(CPU_INDEX),$(PIP_INSTALL) "$$(grep -o '^torch==[^ ]*' requirements/torch.txt)+cpu"))
	@# Else pip would remove a command that it has just installed, if it had belonged to another distribution before.
	@$(BIN)/pip uninstall -qq --disable-pip-version-check --yes $(notdir $(DISTRIBUTIONS))
	$(PIP_INSTALL) --no-index --no-build-isolation $(addprefix --editable ,$(DISTRIBUTIONS))
	@touch $@

demo: $(DEMO)  ## train MNIST on this machine: two nodes of two processes, no Docker, no cluster
	@data='--data-dir $(MNIST)'; \
		timeout 120 $(BIN)/ddptrain fetch --data-dir $(MNIST) >/dev/null 2>&1 || { data='--data digits'; \
		echo 'NOT MNIST: it cannot be downloaded. Training on handwritten digits of scikit-learn (1,797 images)'; }; \
		set -x; $(BIN)/ddpjob run manifests/examples/mnist-cpu.yaml --fresh -- $$data
	@command -v ddpjob >/dev/null || echo "  'source $(BIN)/activate' makes ddpjob and ddptrain available in this shell"

# kind, kubectl and helm of PATH, and a node image of kind, take the place of those that tests build from source.
demo-kind kind-down: export DDPJOB_INSTALLED = kind kubectl helm
demo-kind: $(DEMO)  ## train MNIST on a kind cluster, which is created if necessary
	$(PY) -m tests.e2e.demo --name $(NAME)

demo-down: kind-down  ## delete what demo-kind created

# tests/layers/definitions.py has the commands of each layer and what must be built before it.
test: setup  ## all test layers: lint, unit, local, install, apiserver, ddprun, ddptrain, lessons, kind
	@$(PY) -m tests.layers $(LAYERS)

prepare: setup  ## build and download what all layers need, without running a test
	$(PY) -m tests.kind prepare all

lint: test-lint  ## ruff, mypy, import-linter, yamllint, helm lint

test-lint:
test-unit:  ## the pure core and the operator's parts, without a cluster
test-local:  ## whole jobs as processes of this machine, and the command line
test-install:  ## chart, manifests, docs, programs built from source
test-apiserver:  ## operator against a real kube-apiserver and etcd
test-ddprun:  ## the launcher: restarts, hangs, kills, signals, missing peers
test-ddptrain:  ## the trainer with gloo, up to seven ranks: results, checkpoints, usage
test-lessons:  ## the lessons, and the pages about torch.distributed
test-kind:  ## everything on a real kind cluster

$(LAYER_TARGETS): test-%: setup
	@$(PY) -m tests.layers $*

contract: export DDPJOB_TEST_FAULTS = all
contract: setup  ## of test-apiserver, random requests to the in-memory cluster and a real one
	$(PY) -m tests.kind prepare etcd kube-apiserver kube-controller-manager
	$(PYTEST) tests/worlds/contract

mutants: setup  ## put about 200 errors into a copy of the code, one after the other: do the tests detect them? (MUTANTS="engine ...")
	$(PY) -m tests.kind prepare etcd kube-apiserver kube-controller-manager helm kubectl
	$(PY) -m tests.mutants $(MUTANTS)

# Too long for every run: the figures that the trainer documents.
soak: export DDPTRAIN_TEST_KILLS = 20
soak: export DDPTRAIN_TEST_HANG_TIMEOUT = 60
soak: export DDPJOB_TEST_FAULTS = all
soak: setup  ## long tests: 100,000 simulated jobs, 100,000 schedules of restarts in place and 1,000 forks for them, all faults at all writes, gangs on Kubernetes 1.36 and on coscheduling, a queue of Kueue, scripts that fail on kind, public programs under ddprun, kills and hangs of ranks
	$(PY) -m tests.simulator soak
	$(PY) -m tests.kind prepare etcd kube-apiserver kube-controller-manager
	$(PYTEST) tests/simulator tests/injection tests/worlds/contract
	$(PY) -m tests.kind prepare $(GANGS) helm
	$(PYTEST) tests/gangs/soak_kubernetes.py tests/gangs/soak_coscheduling.py
	$(PY) -m tests.kind prepare kueue
	$(PYTEST) tests/controller/real_kueue.py
	$(PY) -m tests.kind prepare kubectl kind lookup provisioner docker node-image helm images
	$(PYTEST) tests/e2e/test_why.py tests/e2e/test_verbs.py
	$(PY) -m tests.kind prepare all
	$(PYTEST) -m soak tests --ignore tests/injection --ignore tests/worlds/contract --ignore tests/e2e/test_why.py
	$(PY) -m tests.compatibility
	$(PYTEST) tests/ddprun/soak.py tests/lessons/soak.py
	$(PYTEST) tests/ddprun/resilience/test_hangs.py -k 'what_it_was_doing or polls'

format: setup  ## format the code and apply ruff's fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: setup  ## CRD, chart copy, plain manifests, field reference and diagram from their sources
	$(PY) -m tests.install.generate

pictures: setup  ## the curves and the screenshot of the report in docs, from a training in which a rank is killed
	$(PY) -m tests.ddptrain.pictures --data-dir $(MNIST)

lock: setup  ## pin what images and tests install, with hashes (UPGRADE=--upgrade: the newest versions; WHEELS: CPU builds of torch)
	$(PIP_INSTALL) uv==0.13.9
	$(PY) -m tests.install.lock $(UPGRADE) $(or $(WHEELS),$(wildcard ../shared/wheels/torch-*+cpu-*.whl))

images: setup  ## build ddpjob/operator:0.1.0 and ddpjob/trainer:0.1.0
	$(PY) -m tests.kind images

kind-up: setup  ## create a kind cluster for development (NAME=ddpjob)
	$(PY) -m tests.kind up --name $(NAME)

kind-down: $(DEMO)  ## delete that cluster
	$(PY) -m tests.kind down --name $(NAME)

bench-local: setup  ## measure the start of commands, and the time to the first step of ddprun and torchrun
	$(PY) -m tests.benchmarks.command_start
	$(PY) -m tests.benchmarks.script_start

bench: setup  ## measure the time from apply to all pods, and the time of the same requests without an operator
	$(PY) -m tests.benchmarks.apply_to_pods

gpu: setup  ## train, resume and bf16 on this machine's GPUs, and trainings and scripts with failures
	$(PY) -m tests.ddptrain.gpu; trainer=$$?; $(PY) -m tests.ddprun.gpu_scripts && exit $$trainer

clean:  ## delete the virtual environment and caches of this checkout
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find operator trainer_app tests -name __pycache__ -prune -exec rm -rf {} +
