VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
PYTHON ?= python3

.PHONY: demo test check format clean

## Compile two bundles and decode with them: the demo model (skipping does not pay) and a planted one (it does).
demo: $(READY)
	$(BIN)/ssd-compile --model demo --domains cnn,gsm8k --evaluations 32 --out build/demo
	$(BIN)/ssd-run --artifact build/demo --max-new-tokens 48 --compare --explain "Why is the sky blue?"
	$(BIN)/python -m bench.planted --model demo --epsilon 0.05 --out build/planted
	$(BIN)/ssd-compile --model build/planted --domains cnn,gsm8k --evaluations 32 --out build/planted-bundle
	$(BIN)/ssd-run --artifact build/planted-bundle --max-new-tokens 48 --compare --explain "Why is the sky blue?"

## All tests; those of the real model too.
test: $(READY)
	$(BIN)/python -m pytest

## Format, lint, types, layering.
check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@
