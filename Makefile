# Rolecall. `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
# what is installed in the one .venv: everything, or what a job needs; each installation adds to it
READY := $(VENV)/.ready
READY_JOBS := $(READY)-rl $(READY)-ps $(READY)-rnn $(READY)-hybrid
COMMA := ,
# containers, test-versions: the build of torch (cpu, cuda) or its version; an index that has it, if pip's does not
TORCH ?= cpu
TORCH_INDEX ?=
IMAGE ?= rolecall
# push: the tag, if not the build's name; the platforms (of `wheels` too), if not this machine's or all
TAG ?=
PLATFORMS ?=
# chaos: the job, how many events, the seed of their sequence, processes that keep the machine busy beside it, and what
# the kinds of events begin with, such as "kill" or "kill worker"
JOB ?= rl
KILLS ?= 50
SEED ?= 1
LOAD ?= 0
ONLY ?=
# settings of the job, such as "UPDATE_MODE=local WIRE_DTYPE=int8"
SET ?=
# Kubernetes: the installed kubectl, or a downloaded one; a kustomization of your own to check
KUBECTL := $(or $(shell command -v kubectl),build/kubectl)
OVERLAY ?=
FOLDER = $(if $(filter ps,$(JOB)),ps-trainers,$(JOB))
COMPOSE := docker compose --profile '*'
ifeq ($(TORCH),cuda)
export COMPOSE_FILE ?= compose.yaml:docker/compose.cuda.yaml
endif
export TORCH TORCH_INDEX IMAGE TAG PLATFORMS
# an image of your own is used as it is
BUILT := $(if $(filter rolecall,$(IMAGE)),image)

.DEFAULT_GOAL := help
.PHONY: help setup run-rl run-ps run-rnn run-hybrid test test-e2e test-hosts test-slurm test-versions test-engines simulate leaks lint format wheels image push token up-rl up-ps up-rnn up-hybrid up-job up-script up-monitoring kubectl k8s-render k8s-validate k8s-token k8s-kind logs ps-status metrics doctor watch page stop down bench-rl bench-ps bench-rnn bench-hybrid bench-scale bench-start bench-checkpoint bench-tls bench-calls bench-stay bench-machine bench-llm bench-trace bench-weights bench-table peers bench-rl-quality bench-peers chaos docs site clean

help: ## lists the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## creates .venv with everything (PIP_ARGS are pip's options, e.g. an index of CPU builds of torch)

$(READY): EXTRAS = jobs$(COMMA)dev$(COMMA)docs
$(READY_JOBS): EXTRAS = $(@:$(READY)-%=%)
$(READY) $(READY_JOBS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Rolecall needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Set PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "no venv module: install python3-venv (Debian, Ubuntu)" >&2; exit 2; }
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@ $(if $(filter $(READY),$@),$(READY_JOBS))

run-rl: $(READY)-rl ## trains the reinforcement learning job here: one agent, two observers
	$(BIN)/rolecall run rl

run-ps: $(READY)-ps ## trains the parameter server job here: one server, two trainers
	$(BIN)/rolecall run ps

run-rnn: $(READY)-rnn ## trains the language model here: embedding and decoder in one process, LSTM in another
	$(BIN)/rolecall run rnn

run-hybrid: $(READY)-hybrid ## trains the hybrid job here: a master, a server with the table, two trainers under DDP
	$(BIN)/rolecall run hybrid

# set, it has each of hundreds of processes compile the modules anew
test: export PYTHONDONTWRITEBYTECODE =
test: $(READY) $(KUBECTL) ## runs every test that needs neither Docker nor a network
	$(BIN)/python -m pytest -n 4 --dist worksteal

test-e2e: $(READY) $(KUBECTL) image ## runs the jobs in containers: needs Docker with compose, and a registry for the base image only
	$(BIN)/python -m pytest tests/e2e -n 2 --dist loadfile

test-slurm: $(READY) ## runs jobs on a Slurm cluster of its own, as root (Debian: munge slurmctld slurmd slurm-client)
	$(BIN)/python -m pytest tests/slurm -rs

test-hosts: $(READY) ## runs jobs on hosts by ssh: needs root, iproute2 and openssh-server, for namespaces with an sshd each
	$(BIN)/python -m pytest tests/hosts

test-versions: $(READY) ## runs what depends on torch and Python with several of both (TORCH=nightly or TORCH=2.14.1: that one; PYTHON_VERSION=3.13; TORCH_INDEX=...)
	$(BIN)/python -m tools.versions --pip-args "$(PIP_ARGS)" --index "$(TORCH_INDEX)" \
	  $(if $(filter-out cpu cuda,$(TORCH)),--torch "$(TORCH)") $(if $(PYTHON_VERSION),--python "$(PYTHON_VERSION)")

test-engines: ## checks the files for Kubeflow Trainer and SkyPilot against these packages, installed to build/engines/
	@test -x build/engines/bin/python || $(PYTHON) -m venv build/engines
	build/engines/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) \
	  pytest pyyaml skypilot 'kubeflow-trainer-api>=2.3,<3'
	build/engines/bin/python -m pytest --noconftest --override-ini addopts= --override-ini timeout= -W ignore tests/contracts/test_engines.py

simulate: $(READY) ## plays 10,000 random schedules of faults, and tries broken rules (SCHEDULES=, RANKS=200); SEED=n prints the story of one, with SCHEDULES= plays so many from there
	$(BIN)/python -m tests.simulation --ranks $(or $(RANKS),0) $(if $(SCHEDULES),--schedules $(SCHEDULES) --seed $(SEED),$(if $(filter-out file,$(origin SEED)),$(SEED),--mutants))

leaks: $(READY) ## measures what 200 generations of rl and 10,000 steps of rnn leave behind (GENERATIONS=, STEPS=)
	GENERATIONS="$(or $(GENERATIONS),200)" STEPS="$(or $(STEPS),10000)" $(BIN)/python -m pytest tests/integration/test_leaks.py -s

lint: $(READY) ## runs ruff and mypy, and checks the workflows of .github/ offline
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/zizmor --offline --quiet .github

format: $(READY) ## lets ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheels: ## downloads the image's Python packages to docker/wheels/ (TORCH=cpu|cuda, TORCH_INDEX=..., PLATFORMS=linux/arm64)
	@test -x build/pip/bin/python || $(PYTHON) -m venv build/pip
	build/pip/bin/python docker/dependencies.py download --wheels docker/wheels --torch "$(TORCH)" --index "$(TORCH_INDEX)" --platforms "$(PLATFORMS)"

BUILD = --file docker/Dockerfile --build-arg TORCH --build-arg TORCH_INDEX --build-arg BASE="$(or $(BASE),debian:bookworm-slim)" \
  --build-arg VERSION="$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' app/rolecall/config.py)" \
  --build-arg REVISION="$$(git describe --always --dirty --abbrev=40 --exclude='*' 2>/dev/null)"

image: ## builds the image rolecall:cpu (or TORCH=cuda) from docker/wheels/, which it fills if empty
	@ls docker/wheels/*.whl >/dev/null 2>&1 || $(MAKE) wheels
	DOCKER_BUILDKIT=1 docker build --tag "$(IMAGE):$(TORCH)" $(BUILD) .

# not `mode=max`, which publishes build arguments: the address of a package index may contain a password
ATTEST ?= --sbom=true --provenance=mode=min
push: ## builds for amd64 and arm64 and pushes one index with its SBOM (IMAGE=registry.example/team/rolecall, PLATFORMS=linux/amd64, TAG=..., ATTEST= without SBOM)
	@case "$(IMAGE)" in */*) ;; *) echo "rolecall: IMAGE=$(IMAGE): no repository of a registry, such as registry.example/team/rolecall" >&2; exit 2;; esac
	@mkdir -p build
	docker buildx build --push $(ATTEST) --metadata-file build/push.json \
	  --platform "$(or $(PLATFORMS),linux/amd64$(COMMA)linux/arm64)" --tag "$(IMAGE):$(or $(TAG),$(TORCH))" $(BUILD) .
	@sed -n 's|.*"containerimage.digest": *"\(.*\)".*|images: [{name: "$(if $(filter cpu,$(TORCH)),rolecall,rolecall:$(TORCH))", newName: $(IMAGE), digest: "\1"}]|p' build/push.json

token: ## makes the token that ranks in containers share, unless there is one: .secrets/job-token (JOB_TOKEN_SOURCE=FILE)
	@docker/token.sh

up-rl: $(BUILT) ## trains the reinforcement learning job in containers until it is solved (OBSERVERS=2)
	@docker/up.sh rl agent

# compose cannot subtract: the servers other than rank 0
up-ps: $(BUILT) ## trains the parameter server job in containers until its epochs are done (TRAINERS=2 SERVERS=1)
	@[ -z "$$SERVERS" ] || export SHARDS="$${SHARDS:-$$((SERVERS > 1 ? SERVERS - 1 : 0))}"; \
	docker/up.sh ps ps

up-rnn: $(BUILT) ## trains the language model in containers until its epochs are done
	@docker/up.sh rnn rnn-ps

up-hybrid: $(BUILT) ## trains the hybrid job in containers until its epochs are done (TRAINERS=2 SERVERS=1)
	@docker/up.sh hybrid master

up-job: given-JOB_FILE $(BUILT) ## runs a job of your own in containers until it has finished (JOB_FILE=./pi.py)
	@docker/up.sh job job-rank0

up-script: given-SCRIPT $(BUILT) ## runs a torch RPC program, unmodified, in containers (SCRIPT=./FILE.py RANKS=2)
	@docker/up.sh script script-rank0

given-%:
	@test -n "$($*)" || { echo "rolecall: $* is missing: it names a file, such as ./pi.py" >&2; exit 2; }

build/kubectl: tools/kubectl.py | $(READY)
	$(BIN)/python tools/kubectl.py $@

kubectl: $(KUBECTL) ## downloads kubectl to build/ if none is installed (Linux on x86-64)

k8s-render: $(KUBECTL) ## writes the manifests of every overlay of k8s/ to build/k8s/
	@mkdir -p build/k8s
	@for overlay in $$(cd k8s && ls */kustomization.yaml | cut -d / -f 1 | grep -vx base); do \
	  $(KUBECTL) kustomize "k8s/$$overlay" > "build/k8s/$$overlay.yaml" || exit 1; echo "build/k8s/$$overlay.yaml"; done

k8s-validate: $(READY) $(KUBECTL) ## checks the manifests offline: Kubernetes's schemas, the project's rules (OVERLAY=DIR: your own too)
	$(BIN)/python -m pytest tests/contracts/test_manifests.py $(if $(OVERLAY),--overlay "$(OVERLAY)")

k8s-token: SECRET ?= $(patsubst %-cuda,%,$(patsubst %-indexed,%,$(patsubst %-job,%,$(FOLDER))))
k8s-token: $(KUBECTL) ## makes the Secret with the token of a job's pods (JOB=rl: the folder in k8s/; NAMESPACE=...; SECRET=b-rl: of a copy)
	@set -o pipefail; docker/token.sh - | $(KUBECTL) create secret generic "$(SECRET)" \
	  --from-file=JOB_TOKEN=/dev/stdin $(if $(NAMESPACE),--namespace "$(NAMESPACE)") || \
	  { echo "rolecall: no Secret was made. If there is one already, its token is replaced by" \
	    "'kubectl delete secret $(SECRET)', this command, and a restart of all pods:" \
	    "'kubectl delete pods -l app.kubernetes.io/instance=$(SECRET)'; see docs/security.md#rotation" >&2; exit 2; }

k8s-kind: image $(KUBECTL) ## trains on a kind cluster until the job has finished (JOB=rl|ps|rnn|hybrid|job|script; needs kind)
	@KUBECTL="$(KUBECTL)" k8s/kind.sh "$(FOLDER)" "$(IMAGE):$(TORCH)" \
	  "$(if $(filter job,$(JOB)),$(JOB_FILE))$(if $(filter script,$(JOB)),$(SCRIPT))"

up-monitoring: ## starts Prometheus and Grafana on loopback, beside any job (PROMETHEUS_PORT=9090 GRAFANA_PORT=3000)
	@docker compose --profile monitoring up --detach --no-build
	@for one in grafana:3000 prometheus:8000; do \
	  echo "$${one%:*}: http://127.0.0.1:$$(docker compose --profile monitoring port "$${one%:*}" "$${one#*:}" | cut -d : -f 2)"; \
	done

logs: ## follows the containers' logs
	@$(COMPOSE) logs --follow

ps-status: ## shows the containers and what their ranks do
	@docker/ranks.sh status

metrics: ## prints the metrics of every running rank
	@docker/ranks.sh metrics

doctor: ## examines every container of a job, and says what to do where something is wrong (JOB=rl)
	@docker/ranks.sh doctor "$(JOB)"

page: ## prints where rank 0 of the running containers serves its page (Linux: the host reaches their network)
	@docker/ranks.sh page

watch: $(READY) ## shows the live display of the running containers (Linux: the host reaches their network)
	@page=$$(docker/ranks.sh page) && test -n "$$page" || { echo "no container of a rank 0 is running" >&2; exit 2; }; \
	  $(BIN)/rolecall watch $$page

stop: ## stops the containers after a checkpoint; up-JOB resumes from it
	@$(COMPOSE) stop

down: ## deletes the containers, their networks AND their checkpoints
	@$(COMPOSE) down --volumes --remove-orphans

bench-rl: $(READY) ## measures speed and time to solve against the tutorial's way (10 to 20 minutes; BENCH_JSON=FILE)
	$(BIN)/python -m bench.bench_rl

bench-ps: $(READY) ## measures the parameter server's speed and accuracy (15 minutes; BENCH_JSON=FILE)
	$(BIN)/python -m bench.bench_ps

bench-rnn: $(READY) ## measures the language model's speed, bytes and perplexity (15 to 20 minutes; BENCH_JSON=FILE)
	$(BIN)/python -m bench.bench_rnn

bench-hybrid: $(READY) ## measures the hybrid job's speed beside DDP and (after make peers) TorchRec and by size of the table, and its accuracy (15 minutes; BENCH_JSON=FILE)
	$(BIN)/python -m bench.bench_hybrid

bench-scale: $(READY) ## measures what 30 to 3,000 members cost rank 0, and how fast its orders reach them (4 minutes; BENCH_JSON=FILE)
	$(BIN)/python -m bench.bench_scale

bench-start: $(READY) ## measures the seconds from `rolecall run` to each job's first step, as root on hosts too (6 minutes; BENCH_JSON=FILE)
	$(BIN)/python -m bench.bench_start

bench-table: $(READY) ## measures the hybrid job's speed with a table three times larger than its memory (root, 5 minutes; BENCH_JSON=FILE, ARGS="--quick")
	$(BIN)/python -m bench.bench_table $(ARGS)

bench-checkpoint: $(READY) ## measures what checkpoints of large models cost (24 GiB of memory, 15 minutes; BENCH_JSON=FILE SCALE=1)
	$(BIN)/python -m bench.bench_checkpoint --scale $(or $(SCALE),1)

bench-tls: $(READY) ## measures what TLS between ranks costs the jobs: off, require, always, in turns (20 minutes; BENCH_JSON=FILE ROUNDS=3 ONLY=ps,rnn)
	$(BIN)/python -m bench.bench_setting --setting TLS --rounds $(or $(ROUNDS),3) $(if $(ONLY),--only "$(ONLY)")

bench-calls: $(READY) ## measures calls beside (after make peers) gRPC, Monarch and Ray, and torch RPC; as root between namespaces too (15 minutes; BENCH_JSON=FILE ROUNDS=3 ONLY=ours,torch,busy,members)
	$(BIN)/python -m bench.bench_calls --rounds $(or $(ROUNDS),3) $(if $(ONLY),--only "$(ONLY)")

bench-stay: $(READY) ## measures what joins and deaths cost members that take 20 s to load (20 minutes; BENCH_JSON=FILE ONLY=events,spare,goodput BEFORE=COMMIT)
	$(BIN)/python -m bench.bench_stay $(if $(ONLY),--only "$(ONLY)") $(if $(BEFORE),--before "$(BEFORE)")

bench-machine: $(READY) ## measures what copies of checkpoints cost and, as root, how soon a run goes on without rank 0's host (10 minutes; BENCH_JSON=FILE ROUNDS=3 ONLY=copies,host)
	$(BIN)/python -m bench.bench_machine --rounds $(or $(ROUNDS),3) $(if $(ONLY),--only "$(ONLY)")

bench-llm: $(READY) ## measures reinforcement learning of a language model: with random kills, rates beside one process, and beside (after make peers) Ray and Monarch (25 minutes; BENCH_JSON=FILE ONLY=kills,rates,peers SYSTEMS=ours,ray,monarch ARGS="--quick")
	$(BIN)/python -m bench.bench_llm $(if $(ONLY),--only "$(ONLY)") $(if $(SYSTEMS),--systems "$(SYSTEMS)") $(ARGS)

bench-trace: $(READY) ## measures what traces cost the jobs: off and on, in turns (15 minutes; BENCH_JSON=FILE ROUNDS=5 ONLY=ps,rl_observer)
	$(BIN)/python -m bench.bench_setting --setting TRACE --rounds $(or $(ROUNDS),5) $(if $(ONLY),--only "$(ONLY)")

bench-weights: $(READY) ## measures how soon published weights reach 8 readers on links of their own, as root (10 minutes; BENCH_JSON=FILE LINKS=1gbit,100mbit ROUNDS=3 ARGS="--quick")
	$(BIN)/python -m bench.bench_weights --rounds $(or $(ROUNDS),3) $(if $(LINKS),--links "$(LINKS)") $(ARGS)

# a group that cannot be installed is left out: each has a gymnasium of its own
peers: ## installs the libraries that rl, hybrid, calls and examples/grpo.py are measured beside to build/peers/, each group in a venv of its own (15 minutes, 9 GB)
	@for group in sb3 sample-factory rllib torchrec grpc monarch ray; do \
	  rm -f "build/peers/$$group/.ready"; \
	  $(PYTHON) -m venv "build/peers/$$group" && build/peers/$$group/bin/python -m pip install \
	    --disable-pip-version-check $(PIP_ARGS) $$([ "$$group" != torchrec ] || echo --no-deps) \
	    --requirement "bench/peers/requirements-$$group.txt" \
	  && touch "build/peers/$$group/.ready" || echo "rolecall: $$group cannot be installed; the benchmarks leave it out" >&2; done

bench-rl-quality: $(READY) ## measures how well rl learns beside Stable-Baselines3, after make peers (hours in full; BENCH_JSON=FILE, ARGS="--environments tuned --seeds 1-3 --parallel 2")
	$(BIN)/python -m bench.bench_rl_quality $(ARGS)

bench-peers: $(READY) ## measures rl's speed beside the libraries of make peers (2 hours; BENCH_JSON=FILE, ARGS="--quick")
	$(BIN)/python -m bench.bench_peers $(ARGS)

chaos: $(READY) ## kills and freezes a job's ranks and slows their disks at random, as root also cuts networks, and judges the result (JOB=rl KILLS=50 SEED=1 LOAD=0 ONLY= SET="NAME=VALUE ...")
	$(BIN)/python -m tests.chaos --job "$(JOB)" --kills "$(KILLS)" --seed "$(SEED)" --load "$(LOAD)" $(if $(ONLY),--only "$(ONLY)") $(addprefix --set ,$(SET))

docs: $(READY) ## regenerates tables and code in docs/, Grafana's dashboards, the PrometheusRule and the Jobs of k8s/ from the code
	$(BIN)/python -m tools.tables
	$(BIN)/python -m tools.snippets
	$(BIN)/python -m tools.dashboards
	$(BIN)/python -m tools.jobs

site: $(READY) ## builds the documentation as a site, build/site/; a broken link ends it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html; $(BIN)/mkdocs serve shows it while you write"

clean: ## deletes caches, runs and .venv
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis runs build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
