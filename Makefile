# Everything a clone needs: `make serve` and `make test` set up the environment by themselves.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# SGLang's start-up is imports, in three processes: from source it takes three times as long.
unexport PYTHONDONTWRITEBYTECODE
LOCK := uv pip compile --quiet --universal --generate-hashes --no-annotate --no-header --python-version 3.11 \
	--extra test --extra bench pyproject.toml --output-file requirements.lock

.PHONY: serve test check bench lock clean help

help:  ## Show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

serve: $(READY)  ## Serve the embedded demo pair on 127.0.0.1:30000 (ARGS="--n-particles 8 ...")
	$(BIN)/smc-sglang serve $(ARGS)

test: $(READY)  ## Run the tests (ARGS="tests/unit -x ...")
	$(BIN)/python -m pytest $(ARGS)

check: $(READY)  ## Lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## Speed against fidelity on all pairs and beside peers, cost of resampling, KV saved (bench/README.md)
	$(BIN)/python -m bench.frontier
	$(BIN)/python -m bench.resample
	$(BIN)/python -m bench.kv_sharing

lock: $(READY)  ## Remake requirements.lock from pyproject.toml
	$(BIN)/$(LOCK)

clean:  ## Remove the environment
	rm -rf $(VENV)

# uv comes from the lock file too, by pip and with its hashes; it installs the rest.
$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	sed -n '/^uv==/,/[^\\]$$/p' requirements.lock > $(VENV)/uv.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $(VENV)/uv.lock
	$(BIN)/uv pip sync --quiet --require-hashes --python $(BIN)/python requirements.lock
	$(BIN)/uv pip install --quiet --no-deps --no-build-isolation --python $(BIN)/python --editable .
	touch $@
