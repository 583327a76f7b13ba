# Rolecall. `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# containers: the build of torch (cpu, cuda), and pip's address of an index that has it where the default one has not
TORCH ?= cpu
TORCH_INDEX ?=
IMAGE ?= rolecall
# chaos: the job, how many events, and the seed of their sequence
JOB ?= rl
KILLS ?= 50
SEED ?= 1
# Kubernetes: the machine's kubectl, or one that is fetched; a kustomization of one's own to check
KUBECTL := $(or $(shell command -v kubectl),build/kubectl)
OVERLAY ?=
COMPOSE := docker compose --profile '*'
ifeq ($(TORCH),cuda)
export COMPOSE_FILE ?= compose.yaml:docker/compose.cuda.yaml
endif
export TORCH TORCH_INDEX IMAGE

.DEFAULT_GOAL := help
.PHONY: help setup run-rl run-ps run-rnn run-hybrid test test-e2e simulate leaks lint format wheels image up-rl up-ps up-rnn up-hybrid up-monitoring kubectl k8s-render k8s-validate k8s-kind logs ps-status metrics watch stop down bench-rl bench-ps bench-rnn bench-hybrid chaos docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with everything (PIP_ARGS is passed to pip, e.g. an index of CPU builds of torch)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Rolecall needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Set PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "no venv module: install python3-venv (Debian, Ubuntu)" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt --editable '.[dev]'
	@touch $@

run-rl: $(READY) ## train the reinforcement learning job here: one agent, two observers
	$(BIN)/rolecall run rl

run-ps: $(READY) ## train the parameter server job here: one server, two trainers
	$(BIN)/rolecall run ps

run-rnn: $(READY) ## train the language model here: embedding and decoder in one process, LSTM in another
	$(BIN)/rolecall run rnn

run-hybrid: $(READY) ## train the hybrid job here: a master, a server with the table, two trainers under DDP
	$(BIN)/rolecall run hybrid

test: $(READY) $(KUBECTL) ## every test that needs neither Docker nor a network
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-e2e: $(READY) $(KUBECTL) image ## the jobs in containers: needs Docker with compose, and no image registry but for the base
	$(BIN)/python -m pytest tests/e2e

simulate: $(READY) ## 10,000 random schedules of crashes, pauses, joins and cuts against the gang's logic (SCHEDULES=, SEED=)
	$(BIN)/python -m tests.simulation --schedules $(or $(SCHEDULES),10000) --seed $(or $(SEED),1)

leaks: $(READY) ## what 200 generations of rl and 10,000 steps of rnn leave behind (GENERATIONS=, STEPS=)
	GENERATIONS="$(or $(GENERATIONS),200)" STEPS="$(or $(STEPS),10000)" $(BIN)/python -m pytest tests/integration/test_leaks.py -s

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## let ruff mend and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheels: ## download the image's Python packages to docker/wheels/ (TORCH=cpu|cuda, TORCH_INDEX=...)
	@test -x build/pip/bin/python || $(PYTHON) -m venv build/pip
	build/pip/bin/python docker/dependencies.py download --wheels docker/wheels --torch "$(TORCH)" --index "$(TORCH_INDEX)"

image: ## build the image rolecall:cpu (or TORCH=cuda) from docker/wheels/, which it fills where that is empty
	@ls docker/wheels/*.whl >/dev/null 2>&1 || $(MAKE) wheels
	DOCKER_BUILDKIT=1 docker build --file docker/Dockerfile --tag "$(IMAGE):$(TORCH)" \
	  --build-arg TORCH --build-arg TORCH_INDEX \
	  --build-arg VERSION="$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)" \
	  --build-arg REVISION="$$(git rev-parse HEAD 2>/dev/null)" .

up-rl: image ## train the reinforcement learning job in containers until it is solved (OBSERVERS=2)
	@docker/up.sh rl agent

# compose cannot subtract: the servers beside rank 0's
up-ps: image ## train the parameter server job in containers until its epochs are done (TRAINERS=2 SERVERS=1)
	@[ -z "$$SERVERS" ] || export SHARDS="$${SHARDS:-$$((SERVERS > 1 ? SERVERS - 1 : 0))}"; \
	docker/up.sh ps ps

up-rnn: image ## train the language model in containers until its epochs are done
	@docker/up.sh rnn rnn-ps

up-hybrid: image ## train the hybrid job in containers until its epochs are done (TRAINERS=2 SERVERS=1)
	@docker/up.sh hybrid master

build/kubectl: k8s/kubectl.py | $(READY)
	$(BIN)/python k8s/kubectl.py $@

kubectl: $(KUBECTL) ## fetch kubectl to build/ where the machine has none (Linux on x86-64)

k8s-render: $(KUBECTL) ## write the manifests of every overlay of k8s/ to build/k8s/
	@mkdir -p build/k8s
	@for overlay in $$(cd k8s && ls -d *rl* *ps* *rnn* *hybrid*); do \
	  $(KUBECTL) kustomize "k8s/$$overlay" > "build/k8s/$$overlay.yaml" || exit 1; echo "build/k8s/$$overlay.yaml"; done

k8s-validate: $(READY) $(KUBECTL) ## check the manifests, offline: Kubernetes's schemas and the project's rules (OVERLAY=DIR: one's own too)
	$(BIN)/python -m pytest tests/contracts/test_k8s.py $(if $(OVERLAY),--overlay "$(OVERLAY)")

k8s-kind: image $(KUBECTL) ## train on a cluster of kind until the job has finished (JOB=rl|ps|rnn|hybrid; needs kind)
	@KUBECTL="$(KUBECTL)" k8s/kind.sh "$(if $(filter ps,$(JOB)),ps-trainers,$(JOB))" "$(IMAGE):$(TORCH)"

up-monitoring: ## Prometheus and Grafana beside any job, on this machine's loopback (PROMETHEUS_PORT=9090 GRAFANA_PORT=3000)
	@docker compose --profile monitoring up --detach --no-build
	@for one in grafana:3000 prometheus:8000; do \
	  echo "$${one%:*}: http://127.0.0.1:$$(docker compose --profile monitoring port "$${one%:*}" "$${one#*:}" | cut -d : -f 2)"; \
	done

logs: ## follow the containers' logs
	@$(COMPOSE) logs --follow

ps-status: ## show the containers and what their ranks do
	@docker/ranks.sh status

metrics: ## print every running rank's metrics
	@docker/ranks.sh metrics

watch: $(READY) ## the live display of the running containers (Linux: the host reaches their network)
	@addresses=$$(docker/ranks.sh addresses) && test -n "$$addresses" || { echo "no rank's container runs" >&2; exit 2; }; \
	  $(BIN)/python -m rolecall watch $$addresses

stop: ## let the containers write a checkpoint and end; up-JOB goes on from there
	@$(COMPOSE) stop

down: ## delete the containers, their networks AND their checkpoints
	@$(COMPOSE) down --volumes --remove-orphans

bench-rl: $(READY) ## speed and time to solve against the tutorial's way (10 to 20 minutes; BENCH_JSON=FILE for JSON)
	$(BIN)/python -m tests.benchmarks.bench_rl

bench-ps: $(READY) ## the parameter server's speed, accuracy and growth (15 to 20 minutes; BENCH_JSON=FILE for JSON)
	$(BIN)/python -m tests.benchmarks.bench_ps

bench-rnn: $(READY) ## the language model's speed, bytes and perplexity (15 to 20 minutes; BENCH_JSON=FILE for JSON)
	$(BIN)/python -m tests.benchmarks.bench_rnn

bench-hybrid: $(READY) ## the hybrid job's speed by size of the table, and its accuracy (5 minutes; BENCH_JSON=FILE for JSON)
	$(BIN)/python -m tests.benchmarks.bench_hybrid

chaos: $(READY) ## hurt a job's ranks at random, as root also their network, and check what becomes of it (JOB=rl KILLS=50 SEED=1)
	$(BIN)/python -m tests.chaos --job "$(JOB)" --kills "$(KILLS)" --seed "$(SEED)"

docs: $(READY) ## write anew what is made from the code: tables in docs/, Grafana's dashboards, the PrometheusRule
	$(BIN)/python -m tools.tables
	$(BIN)/python -m tools.dashboards

clean: ## delete what was made here: caches, runs, .venv
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis runs build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
