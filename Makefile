VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Tests mostly wait for servers and processes; with many more, heartbeats of two busy cores time out.
TEST_PROCESSES ?= 3

BACKEND ?= serverless
# The emulator in the place of a service: "emulator" stands for serverless.
EMULATED = $(patsubst emulator-serverless,emulator,emulator-$(BACKEND))

.DEFAULT_GOAL := help
.PHONY: help run example test chaos histories check format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(INSTALLED) ## Train the arithmetic example on this machine (BACKEND=dedicated: on a trainer job)
	$(BIN)/everburn run examples/arithmetic/run.json --set backend=$(EMULATED)

example: $(INSTALLED) ## Train another example: make example NAME=frozen_lake
	@test -f "examples/$(NAME)/run.json" || \
	  { echo "which example? NAME is one of:" \
	      $(patsubst examples/%/run.json,%,$(wildcard examples/*/run.json)) >&2; exit 1; }
	$(BIN)/everburn run examples/$(NAME)/run.json

# Tests start hundreds of processes. Without bytecode each of them would compile the project first.
test chaos: export PYTHONDONTWRITEBYTECODE :=

test: $(INSTALLED) ## Run the tests, on real services that they start themselves
	$(BIN)/pytest -q -n $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder --durations=10

chaos: $(INSTALLED) ## Kill, freeze and starve real processes on both backends: everything that `make test` leaves out; two hours
	$(BIN)/pytest -v -m chaos -o console_output_style=count --durations=10

histories: $(INSTALLED) ## Record again the histories that the tests replay
	$(BIN)/pytest -q tests/histories/record.py

check: $(INSTALLED) ## Check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED) ## Format the code and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove the environment and caches; runs/ and .everburn/ stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so that an interrupted installation is repeated.
# PYTHON names an interpreter to prefer.
$(INSTALLED): pyproject.toml constraints.txt
	@python=; for name in $(PYTHON) python3.11 python3.12 python3; do \
	  if $$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
	      2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "Everburn needs Python 3.11 or 3.12, and neither is on the PATH" >&2; exit 1; \
	fi; \
	echo "making $(VENV) with $$($$python --version): takes some minutes the first time"; \
	$$python -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
