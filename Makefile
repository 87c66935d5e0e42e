# demo, check, test, faults, durations, matrix, chaos, slurm, megatron-lm, gpu, lint, docs: each makes
# .venv first when it is missing or stale.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Where torch comes from, if not from pip's own index (an index with CPU builds, say).
TORCH_INDEX_URL ?=
PIP_ARGS ?=
ARGS ?=

VENV := .venv
STAMP := $(VENV)/.installed
# The demo needs less: the framework that it trains with, and what ARGS name.
COMMA := ,
named = $(if $(findstring $(1),$(ARGS)),$(COMMA)$(1))
EXTRAS := megatron$(call named,deepspeed)$(call named,wandb)
DEMO_STAMP := $(VENV)/.installed-$(subst $(COMMA),-,$(EXTRAS))
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)

.PHONY: demo check test faults durations matrix chaos slurm megatron-lm python312 findings gpu \
	gpu-bundle lint docs clean

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
	$(VENV)/bin/elaswave demo $(ARGS)

# Two at a time, file by file; faults have both cores to themselves.
# In the order of the collection: otherwise files with few tests, which may be long ones, come last.
PYTEST_TWICE := $(VENV)/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

# Which tests are in which tier: tests/tiers.py.
check: $(STAMP)
	$(PYTEST_TWICE) -m "not slow and not long" tests/tidy tests/core tests/config $(ARGS)

test: $(STAMP)
	$(PYTEST_TWICE) -m "not slow and not fault" $(ARGS)

faults: $(STAMP)
	$(VENV)/bin/python -m pytest -q -m "fault and not slow" $(ARGS)

# `make faults` of the next part; if all passes, tests/durations.json gets it and the time of each file.
durations: $(STAMP)
	part=$$($(VENV)/bin/python -m tests.sample) && \
	ELASWAVE_SAMPLE=$$part $(MAKE) faults ARGS="-rs --durations=20 --record-durations $(ARGS)"

TOLD := tests/faults/test_told.py tests/schedulers/test_told_by_slurm.py

matrix: $(STAMP)
	$(VENV)/bin/python -m pytest -q tests/core tests/config --hypothesis-profile=exploring
	$(VENV)/bin/python -m pytest -q -m "fault or slow" $(TOLD:%=--ignore=%)
	$(VENV)/bin/python -m pytest -q -m slow --record-results=benchmarks/told.json $(TOLD)
	$(VENV)/bin/python -m tests.matrix $(ARGS)

chaos: $(STAMP)
	$(VENV)/bin/python -m tests.chaos $(ARGS)

# Jobs under a real Slurm on this machine (as root, with slurm-wlm and munge); in `make faults` too.
slurm: $(STAMP)
	$(VENV)/bin/python -m pytest -q -m "slow or not slow" tests/schedulers $(ARGS)

# What CI skips without a checkout: MEGATRON_LM_PATH=... make megatron-lm
megatron-lm: is-checkout $(STAMP)
	$(VENV)/bin/python -m pytest -q -rs --durations=20 -m "checkout and not slow" \
		--record-results=benchmarks/megatron_lm.json $(ARGS)

is-checkout:
	$(if $(wildcard $(MEGATRON_LM_PATH)/pretrain_gpt.py),,$(error MEGATRON_LM_PATH is \
	'$(MEGATRON_LM_PATH)', wanted a checkout of Megatron-LM (tag core_v0.16.1 or core_v0.17.0): \
	MEGATRON_LM_PATH=FOLDER make megatron-lm))

# `make test` with another interpreter, in an environment of its own: PYTHON312=... make python312
python312: is-python312
	$(MAKE) test VENV=.venv312 PYTHON='$(PYTHON312)' \
		ARGS='-rs --durations=20 --record-results=benchmarks/python312.json $(ARGS)'

VERSION = $(shell '$(PYTHON312)' -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>&1 | tail -n 1)

is-python312:
	$(if $(filter-out 3.12,$(if $(PYTHON312),$(VERSION),none)),$(error PYTHON312 is \
	'$(PYTHON312)', wanted an interpreter of Python 3.12: \
	PYTHON312=/usr/bin/python3.12 make python312))

# What surprised us in the packages that we build on; needs a package index. findings/README.md
findings:
	@rc=0; for one in findings/*.sh; do echo "== $$one"; \
		bash "$$one" || { echo "$$one no longer holds" >&2; rc=1; }; done; exit $$rc

# The kit for a machine with GPUs, in at most 25 minutes; ARGS=--stand-ins for the CPU. docs/gpu.md
gpu: $(STAMP)
	$(VENV)/bin/python -m benchmarks.gpu $(ARGS)

# The kit for a machine without a network: wheels for Python 3.12 and the commit, without torch.
gpu-bundle: $(STAMP)
	$(VENV)/bin/python -m benchmarks.gpu.bundle $(ARGS)

lint: $(STAMP)
	$(PYTEST_TWICE) tests/tidy $(ARGS)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict $(ARGS)

# torch goes first and alone, so that nothing else chooses its version or build.
define INSTALL
	@echo "installing into $(VENV), which takes minutes: $(TORCH) first (1 of 2)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) $(TORCH)
	@echo "installing elaswave_plugin with its extras $(1) (2 of 2)"
	@$(PIP) -e '.[$(1)]'
	@touch $@
endef

$(STAMP): setup.py pyproject.toml Makefile
	$(call INSTALL,megatron$(COMMA)deepspeed$(COMMA)wandb$(COMMA)test)

$(DEMO_STAMP): setup.py pyproject.toml Makefile
	$(call INSTALL,$(EXTRAS))

clean:
	rm -rf $(VENV) .venv312 build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
