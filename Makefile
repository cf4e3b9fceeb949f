.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-all lint types format bench-gpu check-vectors mutation fuzz chaos faults soak ci clean docs docs-pages wheel wheel-check lock sbom

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
# Tests and the processes that they start read modules that one of them has compiled, also where the
# environment says that Python keeps none.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip --disable-pip-version-check
# An index with torch's CPU build, such as https://download.pytorch.org/whl/cpu; without one it comes
# from the package index, which may have CUDA's.
TORCH_INDEX ?=
FROM := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

help:       ## list the targets
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

install: $(VENV)/.installed  ## make .venv with the securevfl command in it

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt $(FROM) torch
	$(PIP) install --quiet --constraint constraints.txt $(FROM) --editable '.[paillier,test,lint]'
	@touch $@

demo: install      ## one primary, four secondaries and a dealer, six processes, real digits; under 4 minutes
	$(BIN)/securevfl demo

# Files in their order, which has unit tests last, so that both cores end together; one file stays
# in one worker, which keeps what its tests share.
test: install      ## every test but the slow ones; about 8 minutes on two cores
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Types of calls are left to mypy and to `make test`, where checking them costs as much as a test.
test-fast: install ## unit and property tests, those of stages too, without types of calls checked; minutes
	$(BIN)/python -m pytest tests/unit tests/property tests/stages -n 2 --dist loadfile --jaxtyping-packages= \
		-m 'not bench and not slow and not multiprocess'

test-all: install  ## the slow tests too
	$(BIN)/python -m pytest -m 'not bench'

lint: install      ## format check, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install    ## rewrite in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.docs-installed ## the site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/.docs-installed: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

docs-pages: install ## write the pages that are made from docstrings, and the tables of measurements
	$(BIN)/python tools/make_federation_file_page.py
	$(BIN)/python tools/make_message_table.py
	$(BIN)/python tools/make_errors_page.py
	$(BIN)/python tools/make_figures.py

wheel: $(VENV)/.release-installed ## build sdist and wheel into dist/, and look into both
	$(BIN)/python tools/check_wheel.py --build-only

wheel-check: $(VENV)/.release-installed ## the same, then README's lines in an empty environment with the wheel
	$(BIN)/python tools/check_wheel.py

$(VENV)/.release-installed: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --editable '.[release]'
	@touch $@

lock: $(VENV)/.release-installed ## write packaging/requirements*.txt: exact versions, of an image and of development
	$(LOCK) --extra report --extra psi --extra parquet --extra accounting --extra serve \
		-o packaging/requirements.txt pyproject.toml
	$(LOCK) --extra test --extra lint --extra paillier --extra docs --extra release \
		-o packaging/requirements-dev.txt pyproject.toml

LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate \
	--no-emit-package securevfl --constraints constraints.txt --custom-compile-command "make lock"

sbom: $(VENV)/.release-installed ## list what an image holds as CycloneDX, in sbom.json
	$(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
		--output-file sbom.json packaging/requirements.txt

bench-gpu: install ## time, utilisation and memory of whole runs on a GPU; needs SECUREVFL_DATA
	$(BIN)/python research/gpu/gpu.py
	$(BIN)/python research/fet/attention.py --device cuda

check-vectors: install ## run a file of accounting reference cases: make check-vectors FILE=path
	PYTHONPATH=tests $(BIN)/python -m helpers.check_vectors $(FILE)

MUTANTS ?= 200
SEED ?= 1
RECORD ?= mutants.jsonl

mutation: install  ## break the privacy code in MUTANTS=200 places, and list what no test notices
	$(PIP) install --quiet --constraint constraints.txt --editable '.[mutation]'
	nice -n 10 $(BIN)/python tools/mutation.py --mutants $(MUTANTS) --seed $(SEED) --record $(RECORD)

INPUTS ?= 100000
ENGINE ?= random
TARGETS ?=

fuzz: install      ## INPUTS=100000 inputs that nobody would write to each decoder, ENGINE=random or atheris
	@test $(ENGINE) != atheris || $(PIP) install --quiet --constraint constraints.txt --editable '.[fuzz]'
	nice -n 10 $(BIN)/python tools/fuzz.py $(TARGETS) --inputs $(INPUTS) --engine $(ENGINE) --seed $(SEED)

CYCLES ?= 200

chaos: install     ## kill parties of CYCLES=200 small runs at random, SEED=1, and see that nothing is lost
	nice -n 10 $(BIN)/python tools/chaos.py --cycles $(CYCLES) --seed $(SEED)

faults: install    ## every fault on every party in every phase of small runs; writes its page in research/
	nice -n 10 $(BIN)/python tools/faults.py --page research/faults/README.md

PARTIES ?= 4
MINUTES ?= 2

soak: install      ## one run of PARTIES=4 secondaries for MINUTES=2 under random faults; plots soak.svg
	nice -n 10 $(BIN)/python tools/soak.py --parties $(PARTIES) --minutes $(MINUTES) --seed $(SEED) --plot soak.svg

ci:         ## exactly what CI runs
	bash .ci/run

clean:      ## remove what builds and tests leave behind
	rm -rf build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
