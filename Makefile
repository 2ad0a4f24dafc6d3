# Every target sets up what it needs; `make` alone says what there is.

PYTHON ?= python3
TORCH ?= torch~=2.13.0
TORCH_INDEX_URL ?=
NPROC ?= 2
EXPERIMENT ?= tiny
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

define HELP
make train    teach a small model to reason, here and now; everything lies in runs/$(EXPERIMENT) then
make test     run the whole test suite
make lint     check style and types
make clean    remove $(VENV) and caches; runs/ stays

Each makes $(VENV) when it is missing or older than pyproject.toml. Variables (value now):

  PYTHON            what $(VENV) is made with, 3.11 or newer ($(PYTHON))
  TORCH             what pip installs when $(VENV) has no torch; name another build or a wheel's path ($(TORCH))
  TORCH_INDEX_URL   where pip looks for it ($(or $(TORCH_INDEX_URL),the default index)). The default build brings
                    gigabytes of CUDA libraries; without a GPU, name an index of CPU builds
  EXPERIMENT        make train: a file of configs/experiment ($(EXPERIMENT))
  NPROC             make train: number of processes ($(NPROC))
  ARGS              make train: further settings, such as 'run.seed=1 run.name=second';
                    make test: further pytest options, such as '-k advantage'
endef

.PHONY: help train test slurm lint clean

help:
	@: $(info $(HELP))

train: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) -m grpo_mega.train experiment=$(EXPERIMENT) $(ARGS)

test: $(READY) slurm
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

# tests/slurm start a Slurm of their own. Where it cannot be installed they are skipped, and say what to do.
slurm:
	@PATH="$$PATH:/usr/sbin"; command -v slurmctld >/dev/null || { \
	    test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo "Installing Slurm for tests/slurm." && \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm >/dev/null; } || \
	    echo "Slurm is not installed: tests/slurm will be skipped." >&2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/shellcheck -x slurm/*.sh slurm/lib/*.sh
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "$(PYTHON) is missing or older than 3.11. On Debian or Ubuntu:" >&2; \
	    echo "    apt-get install python3 python3-venv" >&2; \
	    echo "and where that is older: apt-get install python3.11 python3.11-venv, then make PYTHON=python3.11 ..." >&2; \
	    exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make virtual environments. On Debian or Ubuntu:" >&2; \
	    echo "    apt-get install python3-venv" >&2; \
	    exit 1; }
	@echo "Setting up $(VENV): torch, megatron-core and the rest; once, a minute or two."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip show --quiet torch 2>/dev/null || { \
	    command -v nvidia-smi >/dev/null || test -n "$(TORCH_INDEX_URL)" || \
	        echo "No GPU here: TORCH_INDEX_URL can name an index of smaller CPU builds (see make help)."; \
	    set -x; $(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX_URL),--index-url '$(TORCH_INDEX_URL)') '$(TORCH)'; }
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@
