# `make demo` and `make test` are sufficient on a fresh machine: both create the environment first.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo reproduce test engines frameworks docs docs-check release coverage lint format types pytest clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

demo: $(VENV)/installed  ## install, then design, simulate and run six private agents, into out/demo
	$(BIN)/python examples/demo.py

reproduce: $(VENV)/installed  ## reproduce every figure of the paper at reduced scale, with embedded data, into out/reproduction
	$(BIN)/python -m reproduction all --quick --out out/reproduction

test: lint  ## install the development extras, lint, type-check and run every test
	@$(MAKE) --no-print-directory --jobs 2 types pytest
	@echo 'left out: tests with Flower and NVFlare, which make engines runs, and with Fabric, Accelerate and Trainer, which make frameworks runs'

# Each engine has an environment of its own, because their dependencies exclude each other.
engines: $(VENV)-flower/installed $(VENV)-nvflare/installed  ## run agents on Flower and NVFlare, with real servers and sites
	@flower=failed; nvflare=failed; \
	$(VENV)-flower/bin/pytest -n 2 -q -rs tests/contracts tests/test_engines.py tests/test_flower.py tests/test_flower_deployment.py && flower=passed; \
	$(VENV)-nvflare/bin/pytest -n 0 -q -rs -k nvflare tests/contracts tests/test_nvflare.py && nvflare=passed; \
	echo "engines: Flower $$flower, NVFlare $$nvflare"; \
	test $$flower$$nvflare = passedpassed

frameworks: $(VENV)-frameworks/installed  ## run loops under Fabric, Accelerate and Trainer, and fine-tune with PEFT
	$(VENV)-frameworks/bin/pytest -n 2 -q -rs tests/learn/test_frameworks.py
	$(VENV)-frameworks/bin/python examples/fine_tuning.py

docs: $(VENV)/installed-docs  ## build the documentation into docs/_build/html, and run its tutorials
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

# Executing the tutorials takes two minutes of one core. Without it the build still checks links, the
# table of contents and the reference.
docs-check: $(VENV)/installed-docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html -D nb_execution_mode=off \
	  -D suppress_warnings=myst-nb.lexer docs docs/_build/check

release: $(VENV)/installed-dev  ## build wheel and sdist, and use each in a clean environment
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python tests/release_check.py dist/*.whl dist/*.tar.gz

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed-dev  ## format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/installed-dev
	$(BIN)/mypy

pytest: $(VENV)/installed-dev
	$(BIN)/pytest

coverage: $(VENV)/installed-dev  ## run every test and measure coverage, which takes a third longer
	$(BIN)/pytest --cov --cov-report=term

clean:  ## remove the environment and everything generated
	rm -rf $(VENV) $(VENV)-flower $(VENV)-nvflare $(VENV)-frameworks out build dist docs/_build docs/generated docs/out docs/tutorials/out .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage

# A stamp that is newer than pyproject.toml shows that the environment matches it. A second run then
# installs nothing.
$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("corn needs Python 3.11 or newer, found " + sys.version.split()[0] + "; try make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)-flower/installed: SIMULATION = flwr[simulation]
$(VENV)-%/installed: pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)-$*
	$(VENV)-$*/bin/pip install --quiet --editable '.[$*]' pytest pytest-xdist hypothesis $(SIMULATION)
	@touch $@

$(VENV)/installed: pyproject.toml $(VENV)/created
	@echo 'installing corn into $(VENV): a few minutes the first time'
	$(BIN)/pip install --quiet --editable .
	@touch $@

$(VENV)/installed-dev: pyproject.toml $(VENV)/created
	@echo 'installing corn and its development tools into $(VENV): a few minutes the first time'
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $(VENV)/installed $@

$(VENV)/installed-docs: pyproject.toml $(VENV)/created
	$(BIN)/pip install --quiet --editable '.[docs]'
	@touch $(VENV)/installed $@
