# Everything here sets itself up: Go, make, gcc, git and, for what starts a
# Kubernetes on this machine, root are all that must be there beforehand.
# `make help` lists the targets.

SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

MODULE  := github.com/divvy-gpu/divvy
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
COMMIT  ?= $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X $(MODULE)/internal/platform/version.Version=$(VERSION) -X $(MODULE)/internal/platform/version.Commit=$(COMMIT)

# divvy-node binds NVML with cgo. NVML's header calls some of its functions
# deprecated, which the binding binds all the same; without this flag every build
# and every test prints pages of warnings. The rest is Go's default.
export CGO_CFLAGS := -g -O2 -Wno-deprecated-declarations

# Names and users are looked up without the C library, and functions of vendors'
# libraries are bound at their first call, not when the program starts, for the
# library comes later.
NODE_ENV     := CGO_ENABLED=1 CGO_CFLAGS='$(CGO_CFLAGS)'
NODE_TAGS    := netgo,osusergo
NODE_LDFLAGS := $(LDFLAGS) -extldflags=-Wl,-z,lazy

BIN   := $(CURDIR)/bin
DIST  := $(CURDIR)/dist
# Tools are built once per version and survive `make clean`.
CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/divvy
tool_dir = $(CACHE)/tools/$(firstword $(shell sha256sum $(1)/go.mod | cut -c1-12))
GOLANGCI_LINT := $(call tool_dir,tools)/golangci-lint
ACTIONLINT    := $(call tool_dir,tools/actionlint)/actionlint
HELM          := $(call tool_dir,lab/components)/helm

# What the lab installs: make lab-install TOPOLOGY=file MEMORY_UNIT=0.1 VALUES=file
ifdef TOPOLOGY
export TOPOLOGY
endif
ifdef MEMORY_UNIT
export MEMORY_UNIT
endif
ifdef VALUES
export VALUES
endif
ifdef SOAK_MINUTES
export SOAK_MINUTES
endif

FUZZTIME ?= 30s
BENCH    ?= .

# Architectures of images: this machine's; those of a release are both.
ARCHES ?=
both   := amd64,arm64

# Where "make push" brings the images to, such as registry.example.com/divvy, and
# their tag, which is the version when empty.
IMAGE_REPO ?=
IMAGE_TAG  ?=
ifneq (,$(filter push push-image,$(MAKECMDGOALS)))
ifeq (,$(IMAGE_REPO))
$(error IMAGE_REPO is empty; name the registry to push to: make $(MAKECMDGOALS) IMAGE_REPO=registry.example.com/divvy)
endif
endif
$(foreach name,DEVICE_IMAGE_NAME WEBHOOK_IMAGE_NAME PKG_IMAGE_NAME,$(if $($(name)),$(warning $(name) has no effect; see docs/migrating.md)))

# What "make deploy" installs into the cluster of kubectl's present context: the images
# that were built or pushed last, or those of IMAGE_REPO and IMAGE_TAG. K8S_PLATFORM may
# be tkgi. TOTAL_GPU_MEMORY is the memory of one GPU of the pool in MB.
RELEASE          ?= divvy
NAMESPACE        ?= divvy-system
POOL_VALUES      ?= examples/values/pool.yaml
TOTAL_GPU_MEMORY ?=
K8S_PLATFORM     ?= community

SUITES := unit seeds timed plain disk model lab-unit kubelet scheduler planes e2e

##@ Start here

.PHONY: help
help: ## List the targets.
	@awk 'BEGIN { FS = ":.*## " } \
	  /^##@/ { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '\nVariables: TOPOLOGY=file (simulated cards; a path, or a name in lab/topologies),\n  MEMORY_UNIT=1|0.1|0.01|0.001, VALUES=file (of the chart; a path, or a name in lab/values),\n  BENCH=regexp, BENCH_ARGS=flags, ABUSE_ARGS=flags, TRACE=dir, WORKLOADS=names, FUZZTIME=30s, SOAK_MINUTES=4,\n  ARCHES=amd64,arm64, IMAGE_REPO=registry, IMAGE_TAG=tag,\n  TOTAL_GPU_MEMORY=MB, K8S_PLATFORM=community|tkgi (make deploy)\n'

.PHONY: demo
demo: root ## Start a Kubernetes here, install Divvy and show four pods sharing two cards.
	@cd lab && go run ./cmd/demo guide

.PHONY: demo-vendors
demo-vendors: root ## Show cards of three vendors on one node, served by one daemon.
	@cd lab && go run ./cmd/demo vendors

# ROLLING_SECONDS is how long. The end-to-end tests do it for half a minute.
.PHONY: rolling
rolling: root ## Replace divvy-node under two pods a second for three minutes; kubelet rejects none.
	@cd lab && ROLLING_SECONDS=$(or $(ROLLING_SECONDS),180) go test -tags e2e -count=1 -v -timeout 15m -run '^TestRollingUpdate$$' ./e2e

# FROM is the commit to upgrade from.
.PHONY: upgrade
upgrade: root ## Upgrade from the commit FROM to this checkout under running pods, and roll back.
	@cd lab && UPGRADE_FROM=$(or $(FROM),HEAD^) go test -tags e2e -count=1 -v -timeout 30m -run '^TestUpgrade$$' ./e2e/installation

.PHONY: faults
faults: root ## Break cards of three vendors and the daemon's folders under running pods and restore them.
	@cd lab && go run ./cmd/demo faults

.PHONY: demo-mig
demo-mig: root ## Offer NVIDIA GPUs whole and cut into MIG devices, cut them otherwise, and break one.
	@cd lab && go run ./cmd/demo mig

.PHONY: demo-limits
demo-limits: root ## Limit the memory of pods in the driver, break the limit, and evict a pod that uses too much.
	@cd lab && go run ./cmd/demo limits

.PHONY: demo-dra
demo-dra: root ## Give pods devices by ResourceClaims beside extended resources, and move the node to claims and back.
	@cd lab && go run ./cmd/demo dra

.PHONY: demo-why
demo-why: root ## Explain ten pods that wait for ten reasons, and admit each by the command that is printed.
	@cd lab && go run ./cmd/demo why

.PHONY: demo-pool
demo-pool: root ## Run pods on GPUs of a remote pool, step by step.
	@cd lab && go run ./cmd/demo pool

.PHONY: demo-install
demo-install: root ## Install, look, change and remove Divvy, as an administrator does.
	@cd lab && go run ./cmd/demo install

.PHONY: demo-down
demo-down: lab-down ## Remove what these started, without a trace.

# Some tests need a lab that Divvy was never installed in; what a demo left up goes first.
# What waits runs beside what computes, and tests that fail run once more when nothing else
# does: see docs/design/035-what-every-change-runs.md.
.PHONY: test
test: root lab-down ## Run all tests: unit, fuzz seeds, race detector, kubelet's device manager, the lab.
	@rm -rf $(DIST)/tests
	@$(MAKE) test-kubelet || true
	@$(MAKE) e2e-programs || true
	@$(MAKE) test-timed || true
	@setsid hack/background $(MAKE) -k -j2 test-unit test-scheduler test-plain test-disk test-model & computing=$$!; \
	  $(MAKE) test-e2e & lab=$$!; \
	  trap 'kill -- -$$computing; kill $$lab' EXIT; \
	  wait $$computing || true; \
	  $(MAKE) -k -j2 test-planes test-lab-unit || true; \
	  wait $$lab || true; trap - EXIT
	@report="go run ./hack/testsum report -out $(DIST)/tests $(SUITES)"; \
	  $$report || { $(MAKE) -k TESTSUM=again $(patsubst %,test-%,$(filter-out seeds,$(SUITES))); $$report; }

##@ Develop

# The race detector and the other scenarios are left to "make test", and packages that did
# not change are not tested again.
.PHONY: check
check: root ## Check daily work within minutes: linters, unit tests, kubelet's device manager, a scenario on the lab.
	@$(MAKE) -j3 lint check-kubelet check-tests

.PHONY: check-kubelet
check-kubelet:
	@cd lab && go test ./devicemanager/...

.PHONY: check-tests
check-tests:
	go test ./...
	@cd lab && go test -tags e2e -count=1 -run '^(TestNodeStatus|TestGuide)$$' ./e2e

.PHONY: build
build: ## Build the programs into bin/.
	@mkdir -p $(BIN)
	$(NODE_ENV) go build -buildvcs=false -trimpath -tags $(NODE_TAGS) -ldflags '$(NODE_LDFLAGS)' -o $(BIN)/ ./cmd/divvy-node
	CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags '$(LDFLAGS)' -o $(BIN)/ ./cmd/divvy-control ./cmd/divvy-hook ./cmd/kubectl-divvy

# kube-scheduler with Divvy inside, one for each minor of Kubernetes: some minutes the first time.
SCHEDULER_LDFLAGS = $(LDFLAGS) $(foreach value,gitVersion=$(1) gitMajor=1 gitMinor=$(word 2,$(subst ., ,$(1))),-X k8s.io/component-base/version.$(value))
SCHEDULER_BUILD = CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags '$(SCHEDULER_LDFLAGS)' -o $(BIN)/$(2) .
.PHONY: build-schedulers
build-schedulers: ## Build divvy-scheduler for each minor of Kubernetes into bin/.
	@mkdir -p $(BIN)
	cd scheduler && $(call SCHEDULER_BUILD,v1.37.1,divvy-scheduler-1.37)
	cd scheduler/k136 && $(call SCHEDULER_BUILD,v1.36.3,divvy-scheduler-1.36)
	cd scheduler/k135 && $(call SCHEDULER_BUILD,v1.35.4,divvy-scheduler-1.35)

.PHONY: lint
lint: $(GOLANGCI_LINT) $(ACTIONLINT) verify-chart ## Run gofmt, go mod tidy -diff, golangci-lint (with go vet), actionlint and helm lint.
	$(ACTIONLINT) -shellcheck= -pyflakes=
	@unformatted=$$(git ls-files -co --exclude-standard '*.go' | xargs -r gofmt -l); \
	  [ -z "$$unformatted" ] || { printf 'not formatted by gofmt:\n%s\n' "$$unformatted" >&2; exit 1; }
	@for module in . lab lab/components scheduler scheduler/k136 scheduler/k135 tools tools/actionlint; do (cd $$module && echo "go mod tidy -diff in $$module" && go mod tidy -diff) || exit 1; done
	$(GOLANGCI_LINT) run ./...
	cd lab && $(GOLANGCI_LINT) run --build-tags e2e ./...
	cd scheduler && GOFLAGS=-trimpath CGO_ENABLED=0 $(GOLANGCI_LINT) run ./...

# Packages that start no goroutine, in which the race detector has nothing to find and
# makes every test five times as long, which a test of internal/testing/deptest checks.
# The tests that break the disk at each step are the same.
UNRACED       := ./docs ./hack/census ./hack/chartcheck ./internal/install/schedconf
UNRACED_TESTS := ^Test(PowerLoss|PowerLossTwice|DiskFails|EditedAfterPowerLoss)$$

# -timeout ends a package whose tests hang. It is several times what the slowest package
# needs beside the lab, and the report of "make test" names one that comes near it. "make
# lint" runs go vet, so tests need not. Beside the lab these get a part of the processors: the
# more packages share it, the longer a test gets none, and some wait five seconds for a library.
# A program with the race detector would sleep for a second at its end.
RACE = export CGO_ENABLED=1 GORACE=atexit_sleep_ms=50; go run ./hack/testsum $(TESTSUM) -out $(DIST)/tests

# With "again", a suite runs no more than those of its tests that failed.
TESTSUM ?= run

.PHONY: test-unit
test-unit: ## Run unit tests and fuzz seeds under the race detector (no root needed).
	@$(RACE) -suite unit -seeds seeds go test -json -race -vet=off -p 2 -timeout 60m -skip '$(UNRACED_TESTS)' \
	  $$(go list ./... | grep -vxF -f <(go list $(UNRACED) $(TIMED)))

# Packages that fail where a program gets no processor for seconds: replicas with Leases of a
# second, handovers within milliseconds, and a control daemon that must answer within five. They
# run before the others.
TIMED := ./internal/app/extender ./internal/node/deviceplugin ./internal/node/mps

.PHONY: test-timed
test-timed: ## Run the unit tests that need a processor in time, under the race detector (no root needed).
	@$(RACE) -suite timed go test -json -race -vet=off -timeout 30m $(TIMED)

.PHONY: test-plain
test-plain: ## Run unit tests and fuzz seeds of what starts no goroutine (no root needed).
	@go run ./hack/testsum $(TESTSUM) -out $(DIST)/tests -suite plain go test -json -vet=off -timeout 60m $(UNRACED)

.PHONY: test-disk
test-disk: ## Break the disk at each step of a change to kube-scheduler's manifest (no root needed).
	@go run ./hack/testsum $(TESTSUM) -out $(DIST)/tests -suite disk go test -json -vet=off -run '$(UNRACED_TESTS)' ./internal/install/schedconf/host

# Under the race detector, which has nothing to find in one goroutine, it makes a tenth
# of the steps.
.PHONY: test-model
test-model: ## Compare a million random operations on the ledger with a recount (no root needed).
	@go run ./hack/testsum $(TESTSUM) -out $(DIST)/tests -suite model go test -json -vet=off -run '^TestModel$$' ./internal/core/ledger

# Not from the go command's cache, which does not notice changes outside of lab/: of
# the chart, the documents and the Dockerfile.
.PHONY: test-lab-unit
test-lab-unit: $(BIN)/testsum ## Run the lab's own unit tests (no root needed).
	@export LONG='$(LONG)'; $(call testsum-lab,lab-unit) go test -json -vet=off -count=1 -timeout 60m -skip "$$LONG" ./cmd/... ./internal/... ./podfuzz/...

.PHONY: test-kubelet
test-kubelet: $(BIN)/testsum ## Run the tests against kubelet's real device manager (no root needed).
	@$(call testsum-lab,kubelet) go test -json -vet=off -timeout 20m ./devicemanager/...

# The tests are those of the newest minor. "make test-long" runs the program of the others; that
# what it is made of has the right types there takes seconds, where compiling takes minutes.
.PHONY: test-scheduler
test-scheduler: $(BIN)/testsum $(BIN)/typecheck ## Run the tests of divvy-scheduler in kube-scheduler's real framework, and check its types for each minor.
	@for minor in k136 k135; do (export CGO_ENABLED=0; cd scheduler/$$minor && $(BIN)/typecheck $$(go list -deps . | grep '^$(MODULE)')) || exit 1; done
	@cd scheduler && CGO_ENABLED=0 $(BIN)/testsum $(TESTSUM) -out $(DIST)/tests -suite scheduler go test -json -trimpath -vet=off -timeout 20m ./...

# Control planes of their own, which need no root and leave the lab alone. They wait more
# than they compute.
PLANES := ./e2e/daemons ./e2e/node ./e2e/scheduling

.PHONY: test-planes
test-planes: $(BIN)/testsum ## Run the end-to-end tests on control planes of their own.
	@cd lab && go run ./cmd/lab build
	@export LONG='$(LONG)'; $(call testsum-lab,planes) go test -json -vet=off -tags e2e -count=1 -p 3 -timeout 30m -skip "$$LONG" $(PLANES)

# All packages that are no control planes of their own. One after the other: two labs side
# by side keep two processors so busy that each takes twice as long, and that what kubelet
# and the tests wait for comes too late.
.PHONY: test-e2e
test-e2e: root e2e-programs ## Run the end-to-end tests on the lab, but not those of "make test-long".
	@export LONG='$(LONG)'; $(call testsum-lab,e2e) go test -json -vet=off -tags e2e -count=1 -p 1 -timeout 60m -skip "$$LONG" \
	  $$(go list -tags e2e ./e2e/... | grep -vxF -f <(go list -tags e2e $(PLANES)))

.PHONY: test-long
test-long: root lab-down e2e-programs ## Run the end-to-end tests that take minutes each: pages typed out, updates under load, removal, the demos of faults and claims.
	@export LONG='$(LONG)'; $(call testsum-lab,long) go test -json -vet=off -tags e2e -count=1 -p 1 -timeout 60m -run "$$LONG" ./e2e/... ./internal/browser

# Tests that take minutes each, and whose short forms other tests are.
LONG = ^Test(Documents|RollingUpdate|DaemonCrash|RestartsUnderEveryKind|ManyGenerations|FinestUnit|Release|Faults|Overuse|MemoryOveruse|MemoryLimitsStay|MPSStays|ClaimCases|DRA)$$|^Test(Bystanders|DedicatedHandover|SlowVolume|HostileClients)$$|$\
  ^TestPlugin(SlowVolume|PatientGang|ReplicasRaceOn|OfOtherMinors)$$|$\
  ^Test(Upgrade|MakeDeploy|InstallFromPrivateRegistry|InstallFromArchives|Uninstall|UninstallDedicatedScheduler)$$|$\
  ^TestRestarts$$/(-(restarted|deleted|rolled)|^scheduler-killed)$$|^TestCardBreaksUnderPods$$/^lost$$|^TestSizes$$/^5000_nodes$$

# What they run is built before, on all processors: a test that compiles kube-scheduler beside
# others would need minutes.
.PHONY: e2e-programs
e2e-programs: root $(BIN)/testsum
	@cd lab && go run ./cmd/lab build
	@$(MAKE) build
	@cd scheduler && CGO_ENABLED=0 go build -buildvcs=false -trimpath ./...

# testsum runs in lab/, where the tests of the lab's module are.
testsum-lab = cd lab && $(BIN)/testsum $(TESTSUM) -out $(DIST)/tests -suite $(1)

$(BIN)/typecheck: $(wildcard tools/typecheck/*.go)
	@mkdir -p $(BIN)
	@cd tools && go build -buildvcs=false -o $@ ./typecheck

$(BIN)/testsum: $(wildcard hack/testsum/*.go)
	@mkdir -p $(BIN)
	@go build -buildvcs=false -o $@ ./hack/testsum

.PHONY: build-gpu-test
build-gpu-test: ## Build bin/gpu-test, which runs elsewhere without Go and without a network.
	@mkdir -p $(BIN)
	cd lab && $(NODE_ENV) go build -buildvcs=false -trimpath -tags $(NODE_TAGS) -ldflags '$(NODE_LDFLAGS)' -o $(BIN)/gpu-test ./cmd/gpu-test

# gpu-test exits with 3 where there is no NVIDIA GPU; make fails then, too.
# REPORT is the file that receives its report, such as docs/hardware/h100.md.
.PHONY: test-gpu
test-gpu: ## Test on this machine's NVIDIA GPUs; exit code 3 of bin/gpu-test: there is none.
	@if command -v go >/dev/null; then $(MAKE) build-gpu-test; \
	  elif [ ! -x $(BIN)/gpu-test ]; then echo "There is neither Go here nor bin/gpu-test; run \"make build-gpu-test\" where Go is, and bring bin/gpu-test." >&2; exit 1; fi
	@$(BIN)/gpu-test $(if $(REPORT),--report '$(REPORT)')

.PHONY: bench
bench: ## Run the benchmarks: the core, preferred allocation, the extender's and the webhooks' calls.
	go test -run '^$$' -bench '$(BENCH)' -benchmem ./internal/core/... ./internal/scheduler/extender/... ./internal/pool/admission/... ./internal/pool

# BENCH_ARGS are its flags, such as "-nodes 1000 -scenario throughput".
.PHONY: bench-scheduler
bench-scheduler: ## Measure kube-scheduler without Divvy, with the extender and with the plugin, on simulated nodes.
	@cd lab && go run ./cmd/bench-scheduler $(BENCH_ARGS)

# BENCH_ARGS are further flags of bench-scheduler.
.PHONY: bench-dra
bench-dra: ## Measure pods with ResourceClaims per second, and how they are packed, with kube-scheduler and with divvy-scheduler.
	@cd lab && go run ./cmd/bench-scheduler -scenario claims -nodes 1000 -pods 1000 -policy binpack -rounds 3 $(BENCH_ARGS)

.PHONY: failover
failover: ## End the extender, then divvy-scheduler, that leads several times, by force and in order, while pods are scheduled.
	@cd lab && FAILOVER_ROUNDS=6 go test -tags e2e -count=1 -v -timeout 30m -run '^Test(Plugin)?Failover$$' ./e2e/scheduling

.PHONY: bystanders
bystanders: ## Measure how long pods that request no accelerator wait while no extender leads, beside a cluster without Divvy.
	@cd lab && BYSTANDERS=1000 go test -tags e2e -count=1 -v -timeout 40m -run '^TestBystanders$$' ./e2e/scheduling

# ABUSE_ARGS are its flags, such as "-nodes 500 -each 5s -only inspect".
.PHONY: abuse
abuse: root ## Attack every port that is open to pods, and print the programs' memory beside their limits.
	@cd lab && go run ./cmd/abuse $(ABUSE_ARGS)

# TRACE is a directory with the public trace and published.csv, see docs/performance.md;
# WORKLOADS are some of its lists of pods, such as default,cpu250, and SHUFFLES how many
# orders of arrival are tried. SAMPLE=1 shows a policy only the nodes that kube-scheduler would.
TRACE     ?=
WORKLOADS ?= all
SHUFFLES  ?= 10
SAMPLE    ?=
trace-given = [ -n '$(TRACE)' ] || { echo 'TRACE=DIR is needed: a directory with the public trace and published.csv, see docs/performance.md' >&2; exit 2; }
packing     = cd lab && go run ./cmd/packing -trace '$(abspath $(TRACE))' -workload '$(WORKLOADS)' -shuffles '$(SHUFFLES)' $(if $(SAMPLE),-sample)

.PHONY: simulate-published
simulate-published: ## Compare the baselines of the simulation with what was published of them: TRACE=DIR.
	@$(trace-given)
	$(packing) -policy Random,BestFit,GpuPacking,FGD -published '$(abspath $(TRACE))/published.csv'

.PHONY: simulate-packing
simulate-packing: ## Compare the policy fragmentation with the published FGD: TRACE=DIR.
	@$(trace-given)
	$(packing) -policy fragmentation,fragmentation-online,FGD -against FGD -published '$(abspath $(TRACE))/published.csv' -timings

.PHONY: simulate-defragment
simulate-defragment: ## Plan moves of pods in states of the trace at an offered load of 97 %: TRACE=DIR.
	@$(trace-given)
	go test ./internal/report/why -run '^TestTrace$$' -v -timeout 30m -why.trace '$(abspath $(TRACE))'

.PHONY: simulate-sample
simulate-sample: ## Compare it when it sees only the nodes that kube-scheduler would show: TRACE=DIR.
	@$(trace-given)
	$(packing) -sample -policy fragmentation,fragmentation-online -against FGD -published '$(abspath $(TRACE))/published.csv'

.PHONY: simulate-churn
simulate-churn: ## Compare policies where pods come and go: TRACE=DIR.
	@$(trace-given)
	$(packing) -policy fragmentation,fragmentation-online,FGD,BestFit -churn

.PHONY: simulate-claims
simulate-claims: ## Compare policies for pods with units and for the same pods with ResourceClaims: TRACE=DIR.
	@$(trace-given)
	$(packing) -policy binpack,binpack-claims,fragmentation-online,fragmentation-claims -churn

.PHONY: bench-filter
bench-filter: ## Measure filter and prioritize of 5000 nodes over HTTP beside floors that only read and write.
	go test -run '^$$' -bench '^BenchmarkHTTP' -benchtime 2000x ./internal/scheduler/extender

.PHONY: fuzz
fuzz: ## Fuzz every target for FUZZTIME.
	@go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' ./... | while read -r package; do \
	  go test -list '^Fuzz' "$$package" | { grep '^Fuzz' || true; } | while read -r target; do \
	    echo "fuzz $$package $$target"; \
	    go test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 10x "$$package"; \
	  done; \
	done

.PHONY: fuzz-pool
fuzz-pool: ## Fuzz the pool's changes to pods for a minute, against Kubernetes' own validation.
	@cd lab && go test -run '^$$' -fuzz FuzzMutate -fuzztime 1m -fuzzminimizetime 10x ./podfuzz

.PHONY: verify
verify: lint test ## Run all that a change must pass.

.PHONY: verify-chart
verify-chart: $(HELM) ## Check the chart: helm lint, schema, and the configuration that it renders.
	@go run ./hack/chartcheck -helm $(HELM) charts/divvy

# Images for another architecture than this machine's need a C compiler for it, which is
# installed on Debian and its relatives; this needs root.
.PHONY: images
images: ## Build the container images into dist/images, without docker; ARCHES=amd64,arm64 for both, SCHEDULERS=1 for divvy-scheduler too.
	@cd lab && go run ./cmd/release images $(if $(ARCHES),--arch $(ARCHES)) $(if $(SCHEDULERS),--schedulers) --images $(DIST)/images --version '$(VERSION)' --commit '$(COMMIT)'

# "make -j images push" builds first.
.PHONY: push
push: $(filter images,$(MAKECMDGOALS)) ## Push the images of "make images" to IMAGE_REPO, such as registry.example.com/divvy.
	@cd lab && go run ./cmd/release push '$(IMAGE_REPO)' --tag '$(IMAGE_TAG)' --images $(DIST)/images

.PHONY: release
release: ARCHES := $(or $(ARCHES),$(both))
release: SCHEDULERS := 1
release: images $(HELM) ## Make a release in dist/release: manifests, chart, kustomize bases, kubectl-divvy; images.
	@cd lab && go run ./cmd/release files --helm $(HELM) --images $(DIST)/images --pins $(DIST)/pins.txt --out $(DIST)/release --version '$(VERSION)' --commit '$(COMMIT)'

# Nothing that was not resolved and fetched is written; build/unpinned.txt lists what is
# not pinned. dist/pins.txt records all.
.PHONY: pin
pin: ## Write digests of base images and commits of actions into their files; needs a network.
	@cd lab && go run ./cmd/release pin --record $(DIST)/pins.txt

# With IMAGE_REPO docker pushes them, too.
.PHONY: images-docker
images-docker: ## Build the container images with docker, for this machine's architecture.
	@for image in divvy-node divvy-control; do \
	  docker buildx build -f build/Dockerfile --target $$image $(if $(IMAGE_REPO),--push,--load) --build-arg VERSION='$(VERSION)' --build-arg COMMIT='$(COMMIT)' \
	    -t $(or $(IMAGE_REPO),ghcr.io/divvy-gpu)/$$image:$(or $(IMAGE_TAG),$(VERSION)) .; \
	done
	@mkdir -p $(DIST)/images
	@printf 'image:\n  registry: %s\n  tag: "%s"\n' '$(or $(IMAGE_REPO),ghcr.io/divvy-gpu)' '$(or $(IMAGE_TAG),$(VERSION))' > $(DIST)/images/values.yaml

# Names that users of the vendors' programs know.
.PHONY: build-image push-image all
build-image: images ## The same as images, under the name that Bitfusion's Makefile has.
push-image: push ## The same as push, under the name that Bitfusion's Makefile has.
all: build images ## The programs and the images, as ix-device-plugin's Makefile has it.

.PHONY: census
census: ## Count lines of Go, wide ones, packages, private terms and the largest types.
	@go run ./hack/census

.PHONY: generate
generate: ## Write docs/reference, and what the chart has of vendors and policies, from the code.
	go run ./hack/reference

.PHONY: clean
clean: ## Remove bin/ and dist/. Caches of tools and of the lab stay.
	rm -rf $(BIN) $(DIST)

##@ A cluster

# An existing release keeps its values; a new one gets those of POOL_VALUES.
.PHONY: deploy
deploy: $(HELM) ## Install GPUs of a remote pool, or add them to the existing release.
	@case "$(K8S_PLATFORM)" in \
	  community) ;; \
	  tkgi) echo "K8S_PLATFORM=tkgi: nothing particular is needed; no CFSSL, no pod security policy." ;; \
	  *) echo "K8S_PLATFORM=$(K8S_PLATFORM) is not known; write community or tkgi." >&2; exit 1 ;; \
	esac
	@if $(HELM) status $(RELEASE) -n $(NAMESPACE) >/dev/null 2>&1; \
	  then values="--reset-then-reuse-values"; else values="-f $(POOL_VALUES)"; fi; \
	if [ -e dist/images/values.yaml ]; then echo "Images: those of dist/images/values.yaml."; values+=" -f dist/images/values.yaml"; fi; \
	$(HELM) upgrade --install $(RELEASE) charts/divvy -n $(NAMESPACE) --create-namespace $$values --set pool.enabled=true \
	  $(if $(TOTAL_GPU_MEMORY),--set pool.totalGPUMemory=$(TOTAL_GPU_MEMORY)) \
	  $(if $(IMAGE_REPO),--set-string image.registry=$(patsubst http://%,%,$(IMAGE_REPO))) $(if $(IMAGE_TAG),--set-string image.tag=$(IMAGE_TAG))

# Kubelet remembers device plugins for five minutes.
.PHONY: uninstall
uninstall: $(HELM) ## Remove the release that "make deploy" made, and all that its programs left; six minutes.
	@$(HELM) uninstall $(RELEASE) -n $(NAMESPACE) --ignore-not-found --wait

##@ The lab: a real Kubernetes on this machine

.PHONY: lab-up
lab-up: root ## Start it (etcd to kubelet, built from source the first time) and print the KUBECONFIG line.
	@cd lab && go run ./cmd/lab up

.PHONY: lab-install
lab-install: root ## Build the images, load them and install the chart on simulated cards.
	@cd lab && go run ./cmd/lab install

.PHONY: lab-down
lab-down: root ## Stop it and remove every process, mount, interface and file of it.
	@cd lab && go run ./cmd/lab down

.PHONY: soak
soak: root ## Create and delete pods at random with restarts in between, then compare all records.
	@cd lab && go run ./cmd/soak

.PHONY: soak-limits
soak-limits: root ## Let pods try for more than their limits with restarts in between, and compare limits, use and tiers all the time.
	@cd lab && go run ./cmd/soak --limits

.PHONY: soak-dra
soak-dra: root ## Let pods with units and pods with ResourceClaims come and go on one node with restarts in between, and compare all records all the time.
	@cd lab && go run ./cmd/soak --claims

.PHONY: root
root:
	@[ "$$(id -u)" = 0 ] || { echo "This starts a Kubernetes on this machine and therefore needs root: sudo make $(firstword $(MAKECMDGOALS))" >&2; exit 1; }

$(GOLANGCI_LINT):
	@echo "Building golangci-lint into $(@D); the first time takes some minutes."
	@mkdir -p $(@D)
	@cd tools && CGO_ENABLED=0 go build -o $@.tmp github.com/golangci/golangci-lint/v2/cmd/golangci-lint && mv $@.tmp $@

$(ACTIONLINT):
	@echo "Building actionlint into $(@D)."
	@mkdir -p $(@D)
	@cd tools/actionlint && CGO_ENABLED=0 go build -o $@.tmp github.com/rhysd/actionlint/cmd/actionlint && mv $@.tmp $@

# Prints where helm is, once it is built.
.PHONY: helm
helm: $(HELM)
	@echo $(HELM)

$(HELM):
	@echo "Building helm into $(@D)."
	@mkdir -p $(@D)
	@cd lab/components && CGO_ENABLED=0 go build -o $@.tmp helm.sh/helm/v3/cmd/helm && mv $@.tmp $@
