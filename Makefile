# EchoSwarm: `make` prints this menu; every target sets up what it needs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ORACLES := .venv-oracles/bin
UV     := 0.13.8
CYCLONEDX := 7.5.0
PIP_AUDIT := 2.10.1
# Everything that the tests of this machine need; see [project.optional-dependencies] for the roles.
EXTRAS := all-cpu
STAMP  := $(VENV)/.installed
# Of `make chaos-long` and `make soak`.
FAULTS  ?= 200
MINUTES ?= 20
# Three at a time, each file in one process: most of a test's time is processes that start and brokers that answer. Files go out in the order
# of `testpaths`, the longest first. A test that ends its process ends the run: what it held would be waited for without end.
SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
CODE   := schemas infra producers streams consumers tests bench

# Byte code is kept: without it heavy libraries take three times as long to import.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint types unit nightly learning oracles fmt chaos chaos-long upgrade-test soak bench constraints sbom pip-audit licences clean

help: ## Print this menu
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make the virtual environment (.venv) with everything pinned
	@echo "Ready: $(BIN)/echoswarm --help"

$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "EchoSwarm needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "This Python cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "Installing into $(VENV) (a minute or two; torch is the most of it) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV)
	@$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraints constraints.txt \
		--editable '.[$(EXTRAS)]' --group dev
	@touch $(STAMP)

test: $(STAMP) ## Run every test that needs no GPU, on a real Kafka (started for you)
	$(BIN)/pytest -q $(SIDE_BY_SIDE) --durations=20

unit: $(STAMP) ## Run the unit tests only: no I/O, no browser
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadfile -m 'not slow' tests/unit tests/fuzz

nightly: $(STAMP) ## Run every test at full length: all faults, the whole model check, every example, other generated cases; hours
	ECHO_THOROUGH=1 $(BIN)/pytest -q $(SIDE_BY_SIDE) --durations=20
	$(BIN)/python -m tests.fuzz --cases 100000
	-$(BIN)/uv pip install --quiet --python $(BIN)/python atheris
	$(BIN)/python -m tests.fuzz.guided --seconds 600
	$(BIN)/python -m tests.endurance --minutes $(MINUTES)

learning: $(STAMP) ## Does it learn as the papers say: nine runs, forty minutes on two quiet cores; goes on where it was interrupted
	$(BIN)/python bench/learning.py --set nightly --page docs/learning.md --picture docs/images/learning.png

oracles: $(STAMP) ## Compare the losses, and a training, with TRL's and verl's own, in an environment that it makes (.venv-oracles, about 5 GB)
	@test -x $(ORACLES)/python || $(BIN)/uv venv --quiet --python $(BIN)/python .venv-oracles
	$(BIN)/uv pip install --quiet --python $(ORACLES)/python --requirements tests/oracles/requirements.txt --editable '.[learner]'
	$(ORACLES)/python -m pytest -q -c tests/oracles/pytest.ini tests/oracles

chaos: $(STAMP) ## Kill, freeze and cut off everything in a real run on three brokers, six to ten minutes
	ECHO_THOROUGH=1 $(BIN)/pytest tests/chaos

chaos-long: $(STAMP) ## The same for hundreds of faults, unattended, with a table at the end (FAULTS=200, SEED=...)
	$(BIN)/python -m tests.chaos.long --faults $(FAULTS) $(if $(SEED),--seed $(SEED))

upgrade-test: $(STAMP) ## Replace every role of a run by another release while it goes on, and back (FROM=commit or tag)
	ECHO_THOROUGH=1 ECHO_UPGRADE_FROM=$(FROM) $(BIN)/pytest -q -s tests/upgrade

soak: $(STAMP) ## Does anything grow: a run watched for MINUTES=20, then one that makes more than its learner takes
	$(BIN)/python -m tests.endurance --minutes $(MINUTES)

demo: $(STAMP) ## Watch a tiny language model learn: Kafka, vLLM, Faust and DeepSpeed, two minutes
	$(BIN)/echoswarm demo

check: lint ## Format, lint, types, import layers and unit tests
	@$(MAKE) --no-print-directory --jobs=2 types unit

lint: $(STAMP)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

fmt: $(STAMP) ## Format and mend what the linter can mend
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

bench: $(STAMP) ## Measure everything against its baseline on this machine (about forty minutes)
	$(BIN)/python bench/datapath.py
	$(BIN)/python bench/weights.py
	$(BIN)/python bench/broadcast.py
	$(BIN)/python bench/rewards.py
	$(BIN)/python bench/rollout.py
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/requestreply.py
	$(BIN)/python bench/overhead.py --mode sequential
	$(BIN)/python bench/pool.py
	$(BIN)/python bench/tasks.py
	$(BIN)/python bench/audit.py
	$(BIN)/python bench/replay.py
	$(BIN)/python bench/viewer.py
	$(BIN)/python bench/recovery.py
	$(BIN)/python bench/simulation.py

constraints: $(STAMP) ## Compile constraints.txt anew (no URLs, no hashes)
	$(BIN)/uv pip compile pyproject.toml --extra all-cpu --group dev --python-version 3.11 \
		--no-annotate --no-header --upgrade --quiet --output-file constraints.txt
	$(BIN)/uv pip compile pyproject.toml --extra rollout --extra registry --extra tasks --extra signatures --extra otel \
		--python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-annotate --no-header --upgrade --quiet \
		--output-file infra/deploy/constraints-cuda.txt

sbom: $(STAMP) ## Write what is installed as a CycloneDX document (dist/sbom.cdx.json)
	@mkdir -p dist
	@$(BIN)/uv tool run --quiet --from cyclonedx-bom==$(CYCLONEDX) cyclonedx-py environment $(BIN)/python \
		--pyproject pyproject.toml --mc-type application --output-reproducible --output-format JSON --output-file dist/sbom.cdx.json
	@echo "dist/sbom.cdx.json"

pip-audit: $(STAMP) ## Ask for known vulnerabilities of what constraints.txt names (dist/vulnerabilities.json)
	@mkdir -p dist && rm -f dist/vulnerabilities.json
	@$(BIN)/uv tool run --quiet pip-audit==$(PIP_AUDIT) --requirement constraints.txt --no-deps --disable-pip --vulnerability-service osv \
		--progress-spinner off --format json --output dist/vulnerabilities.json 2>dist/pip-audit.log; found=$$?; \
		test -s dist/vulnerabilities.json || { echo "Nothing was audited: the vulnerability service (osv.dev) does not answer (dist/pip-audit.log)."; exit 3; }; \
		echo "dist/vulnerabilities.json"; exit $$found

licences: $(STAMP) ## Write docs/licences.md anew
	$(BIN)/python infra/deploy/licences.py

clean: ## Remove the virtual environment and all caches of this checkout
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist build
