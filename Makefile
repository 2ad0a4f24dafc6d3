# Every target sets up what it needs; `make` alone says what there is.

PYTHON ?= python3
TORCH ?= torch~=2.13.0
TORCH_INDEX_URL ?=
NPROC ?= 2
TEST_PROCESSES ?= 3
EXPERIMENT ?= tiny
SMOKE ?= one
MINUTES ?= 60
ARGS ?=

# Images of containers often set it, and then every process compiles again all that it imports.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SGLANG_VENV := .venv-sglang
SGLANG_READY := $(SGLANG_VENV)/.ready
SGLANG_BEFORE_READY := $(SGLANG_VENV)/before/.ready
SGLANG_SHIM := $(CURDIR)/tests/sglang/cpu_shim
REHEARSE_VENV := .venv-rehearse
REHEARSE_READY := $(REHEARSE_VENV)/.ready
# Rooms with a long suite of their own.
LONG_ROOMS := parity slurm train sandbox docs rehearsal
# On both sides of 0.5.21, which changed how weights are pushed.
SGLANG := 0.5.23
SGLANG_BEFORE := 0.5.20

define HELP
make train    teach a small model to reason, here and now; everything lies in runs/$(EXPERIMENT) then
make r1-tiny  all of DeepSeek-R1 in miniature: R1-Zero, cold start, RL, rejection sampling, RL again, distillation
make test     test every room, in nine to ten minutes on two cores; twenty where memory is slow
make test-all  run the whole test suite: the long suites below as well, two hours in all
    test-parity    training under a hundred layouts against one process, and whether planted bugs are noticed
    test-slurm     faults of jobs on a real Slurm
    test-train     runs that are killed, stopped, and continued under other layouts
    test-sandbox   attacks of programs on the machine that runs them, many times over
    test-rehearsal  ranks of every GPU experiment on a GPU that computes nothing, in $(REHEARSE_VENV)
    test-docs      every command of README.md and docs/ that runs on a CPU, shortened
    test-rooms     what takes long in the other rooms; test-reward is a part of it
    test-sglang    generation in SGLang $(SGLANG) and $(SGLANG_BEFORE) on a CPU, in $(SGLANG_VENV): 3 GB, under an hour;
                   test-sglang-newest is the first of them, test-sglang-contract the shortest part of that
make test-hunt  look for new failures: ten times as many random examples as `make test`, which tries the same ones every time
make rehearse  run the stages of every GPU experiment on a GPU that computes nothing, and hold their budgets of memory
              and launches (docs/gpu.md); in $(REHEARSE_VENV), 7 GB
make gpu-smoke  the first hour on a GPU: what needs one, step by step, collected in gpu-smoke/ to be sent back;
              SMOKE=two for two GPUs, SMOKE=node for all of a machine (docs/first_gpu.md)
make site     build the documentation as a web site, in site/
make lint     check style and types
make clean    remove virtual environments and caches; runs/ stays

The others make $(VENV) when it is missing or older than pyproject.toml. Variables (value now):

  PYTHON            what $(VENV) is made with, 3.11 or newer ($(PYTHON))
  TORCH             what pip installs when $(VENV) has no torch; name another build or a wheel's path ($(TORCH))
  TORCH_INDEX_URL   where pip looks for it ($(or $(TORCH_INDEX_URL),the default index)). The default build brings
                    gigabytes of CUDA libraries; without a GPU, name an index of CPU builds
  EXPERIMENT        make train: a file of configs/experiment ($(EXPERIMENT))
  NPROC             make train: number of processes ($(NPROC))
  TEST_PROCESSES    make test: files that are tested at once ($(TEST_PROCESSES)); some tests only wait, so more than there are cores
  SMOKE             make gpu-smoke: one, two or node ($(SMOKE))
  MINUTES           make test-hunt: how long it looks ($(MINUTES))
  ARGS              make train: further settings, such as 'run.seed=1 run.name=second' (which trains a base model of its own too);
                    make r1-tiny: settings of all its runs, and --root FOLDER for another chain;
                    make test: further pytest options, such as '-k advantage'
endef

.PHONY: help site gpu-smoke rehearse test-rehearsal train r1-tiny test test-all test-parity test-slurm test-train test-sandbox test-docs test-rooms test-reward test-hunt \
    test-sglang test-sglang-newest test-sglang-contract slurm lint clean

FREE_PORT := import socket; print(socket.create_server(('127.0.0.1', 0)).getsockname()[1])

help:
	@: $(info $(HELP))

train: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --master-port $$($(BIN)/python -P -c "$(FREE_PORT)") --nproc-per-node $(NPROC) \
	    -m grpo_mega.train experiment=$(EXPERIMENT) $(ARGS)

r1-tiny: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tools/recipe.py run r1_tiny $(ARGS)

# A file's tests stay in one process: what they share is made once. Files keep the order of tests/conftest.py, while xdist
# alone would begin with those of the most tests, and end with single tests of a minute.
test: $(READY) slurm
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not long' -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: test $(LONG_ROOMS:%=test-%) test-rooms test-sglang

# What `make test` leaves out of a room, and of all others.
$(LONG_ROOMS:%=test-%) test-reward: $(READY) slurm
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m long $(wildcard tests/$(@:test-%=%) tests/*/$(@:test-%=%)) $(ARGS)

# Another order of files each time: an hour is not enough for all of them on slow machines.
test-hunt: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not long' -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
	    --hunt $(MINUTES) --shuffle $$(date +%s) $(ARGS)

rehearse: $(READY) $(REHEARSE_READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m long -n 2 -rP tests/forecast/rehearsal/test_rehearsal_budgets.py $(ARGS)

test-rehearsal: $(REHEARSE_READY)

test-rooms: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m long tests $(addprefix --ignore ,$(foreach room,$(LONG_ROOMS),$(wildcard tests/$(room) tests/*/$(room)))) $(ARGS)

test-sglang: test-sglang-newest $(SGLANG_BEFORE_READY)
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(SGLANG_VENV)/before:$(SGLANG_SHIM) $(SGLANG_VENV)/bin/python -m pytest tests/sglang $(ARGS)

test-sglang-newest: $(SGLANG_READY)
	OMP_NUM_THREADS=1 PYTHONPATH=$(SGLANG_SHIM) $(SGLANG_VENV)/bin/python -m pytest tests/sglang $(ARGS)

test-sglang-contract: $(SGLANG_READY)
	OMP_NUM_THREADS=1 PYTHONPATH=$(SGLANG_SHIM) $(SGLANG_VENV)/bin/python -m pytest tests/sglang -k 'contract or grpo or parsers' $(ARGS)

# tests/slurm start a Slurm of their own, tests/judges/sandbox need bubblewrap, tests/show/report Chromium, tests/train tmux. Where they
# cannot be installed, tests are skipped.
slurm:
	@PATH="$$PATH:/usr/sbin"; { command -v slurmctld && command -v bwrap && command -v chromium && command -v tmux; } >/dev/null || { \
	    test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo "Installing Slurm, bubblewrap, Chromium and tmux for tests." && \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm bubblewrap chromium tmux >/dev/null; } || \
	    echo "Slurm, bubblewrap, Chromium or tmux is not installed: their tests will be skipped." >&2

site: $(READY)
	$(BIN)/python -m mkdocs build --strict --clean

# The environment is the one that docs/first_gpu.md has made: nothing is installed into it here.
gpu-smoke:
	@test -x $(BIN)/python || { echo "$(BIN) is missing: docs/first_gpu.md says how to make it for GPUs" >&2; exit 1; }
	$(BIN)/python tools/gpu_smoke.py $(SMOKE) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/shellcheck -x slurm/*.sh slurm/lib/*.sh
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	cat $(filter-out %.min.js,$(wildcard grpo_mega/show/report/page/*.js)) > $(VENV)/report.js  # the page has one script
	$(BIN)/oxlint --config .oxlintrc.json --no-ignore --deny-warnings $(VENV)/report.js

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(REHEARSE_VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
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

# SGLang asks for CUDA libraries that have no use on a CPU: it comes without its dependencies, requirements.txt has the rest.
$(SGLANG_READY): pyproject.toml tests/sglang/requirements.txt tests/sglang/constraints.txt
	@echo "Setting up $(SGLANG_VENV): SGLang and what it imports; once, some minutes."
	@$(PYTHON) -m venv $(SGLANG_VENV)
	@$(SGLANG_VENV)/bin/python -m pip show --quiet torch 2>/dev/null || { \
	    set -x; \
	    $(SGLANG_VENV)/bin/python -m pip install --quiet $(if $(TORCH_INDEX_URL),--index-url '$(TORCH_INDEX_URL)') '$(TORCH)'; }
	$(SGLANG_VENV)/bin/python -m pip install --quiet -c tests/sglang/constraints.txt -r tests/sglang/requirements.txt -e .
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps sglang==$(SGLANG) triton==3.9.0 torchvision==0.28.0
	@touch $@

$(SGLANG_BEFORE_READY): $(SGLANG_READY)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps --upgrade --target $(SGLANG_VENV)/before sglang==$(SGLANG_BEFORE)
	@touch $@

# A CUDA build of torch, whose libraries are the default index's: 7 GB. The headers are what compiles against it.
$(REHEARSE_READY): pyproject.toml constraints-gpu.txt $(wildcard grpo_mega/forecast/rehearsal/nullgpu/*) grpo_mega/forecast/rehearsal/build.py
	@echo "Setting up $(REHEARSE_VENV): torch for CUDA, Transformer Engine, and a GPU that computes nothing; 7 GB, minutes."
	@$(PYTHON) -m venv $(REHEARSE_VENV)
	$(REHEARSE_VENV)/bin/python -m pip install --quiet --no-cache-dir -c constraints-gpu.txt torch nvidia-cuda-crt nvidia-cuda-cccl \
	    setuptools wheel -e . transformer-engine transformer-engine-cu13 einops onnx onnxscript
	$(REHEARSE_VENV)/bin/python -m grpo_mega.forecast.rehearsal.build --transformer-engine
	@touch $@
