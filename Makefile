# make demo | test | check | docs | proto | clean; everything is installed into .venv, and only when pyproject.toml changes.

# A Python of 3.11 or later, with venv (Debian: python3-venv).
PYTHON ?= python3
# Alone and first: where pip is told of a CPU build (2.13.0+cpu, from an index or a folder of wheels) it prefers that.
TORCH ?= torch==2.13.0
# What the tests serve, beside models that they make.
MODELS := smollm2 gemma3-270m
# What `make test` hands to pytest, such as ARGS="tests/unit -k handoff".
ARGS ?=

BIN := .venv/bin
PROTOS := src/kvrelay/proto/inference.proto src/kvrelay/proto/node.proto src/kvrelay/proto/transfer.proto
PROTOC = $(BIN)/python -m grpc_tools.protoc -I src
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Tests compute in processes that kvrelay did not start: OpenMP's threads must not spin there either (docs/log.md).
export OMP_WAIT_POLICY = PASSIVE

.PHONY: demo test check docs proto clean
.DELETE_ON_ERROR:

demo: .venv/installed
	@$(BIN)/kvrelay demo

test: .venv/installed-dev
	@for model in $(MODELS); do $(BIN)/kvrelay model fetch $$model || exit; done
	@$(BIN)/python -m pytest $(ARGS)

check: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_imports.py
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT \
	  && $(PROTOC) --python_out=$$fresh --pyi_out=$$fresh --grpc_python_out=$$fresh $(PROTOS) \
	  && for file in "$$fresh"/kvrelay/proto/*; do \
	       cmp -s "$$file" "proto/$${file##*/}" || { echo "proto/$${file##*/} is stale: run make proto"; exit 1; }; \
	     done && echo "generated code is fresh"

docs: .venv/installed-dev
	$(BIN)/python -m kvrelay.cli.reference >docs/configuration.md

proto: .venv/installed-dev
	$(PROTOC) --python_out=src --pyi_out=src --grpc_python_out=src $(PROTOS)

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/torch: | .venv/bin/python
	$(BIN)/python -m pip install "$(TORCH)"
	@touch $@

.venv/installed: pyproject.toml .venv/torch
	$(BIN)/python -m pip install -e .
	@touch $@

.venv/installed-dev: pyproject.toml .venv/torch
	$(BIN)/python -m pip install -e ".[dev]"
	@touch $@ .venv/installed
