# Everything is done in a virtual environment per Python version under .venv/, made here with plain
# venv and pip. `make help` lists the targets; `make test PYTHON=python3.13` uses another Python.

PYTHON ?= python3
CC ?= cc

# A pyenv shim exists for every installed version, but runs only the selected ones: go past it.
python := $(shell \
	if $(PYTHON) -c '' 2>/dev/null; then command -v $(PYTHON); \
	elif command -v pyenv >/dev/null; then \
		version=$$(pyenv whence $(notdir $(PYTHON)) 2>/dev/null | tail -n 1); \
		test -z "$$version" || echo "$$(pyenv prefix $$version)/bin/$(notdir $(PYTHON))"; \
	fi)
ifeq ($(python),)
$(error $(PYTHON) does not run; name a Python of 3.11 or later: make $(MAKECMDGOALS) PYTHON=...)
endif
tag := $(shell $(python) -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
venv := .venv/$(tag)
bin := $(venv)/bin
build := build/$(tag)

core := hydrax/_core.abi3.so
# The handlers for XLA need its header; what drives the core alone does without them.
core_sources := $(filter-out csrc/hx_xla.c,$(sort $(wildcard csrc/hx_*.c)))
sources := $(wildcard csrc/*.c csrc/*.h)
c_files := $(sources) $(wildcard tests/core/*.c tests/core/*.h)
stress := tests/core/stress.c tests/core/draws.c
py_files := $(wildcard hydrax tests benchmarks examples sphinx setup.py)

# Output appears as it is made, also through a pipe.
export PYTHONUNBUFFERED = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Not the build backend's general advice about editable installs.
pip := PYTHONWARNINGS=ignore $(bin)/python -m pip install --quiet

.DELETE_ON_ERROR:
# Two steps can write the same extension module; the steps themselves use the processors.
.NOTPARALLEL:
.PHONY: help demo test check lint types sanitize docs wheel bench format clean

help:
	@echo 'make demo      train on images that loader processes decode, and draw what came out'
	@echo 'make test      run the tests'
	@echo 'make check     everything that has to pass: lint, types, sanitize, test'
	@echo 'make lint      ruff, clang-format, and a build in which C warnings are errors'
	@echo 'make types     mypy'
	@echo 'make sanitize  the C core under the thread, address and undefined-behaviour sanitizers'
	@echo 'make docs      the HTML pages, in build/docs'
	@echo 'make wheel     the wheel, checked by auditwheel and abi3audit, in wheelhouse'
	@echo 'make bench     compare with other loaders'
	@echo 'make format    format Python and C'
	@echo 'make clean     remove what was built, and the virtual environments'
	@echo 'PYTHON=python3.13 uses another Python; ARGS="-k name" is passed on by test, demo and bench'

# --- environments ---------------------------------------------------------------------------------
# One stamp per set of packages; they all go into the same environment.

$(venv)/.made:
	@echo 'making $(venv) with $(python)'
	$(python) -m venv $(venv)
	$(pip) --upgrade pip 'setuptools>=77' wheel
	@touch $@

$(venv)/.%: pyproject.toml hydrax/_version.py | $(venv)/.made
	@echo 'installing hydrax[$*] into $(venv)'
	$(pip) --editable '.[$*]'
	@touch $@

# An editable install builds the extension too; this is for changes to the C sources alone.
$(core): setup.py $(sources) | $(venv)/.made
	$(bin)/python setup.py --quiet build_ext --inplace
	@touch $@

# --- for everybody --------------------------------------------------------------------------------

demo: $(venv)/.demo $(core)
	$(bin)/python examples/digits.py $(ARGS)

# Two processes, each with some of the files; ARGS="-n 0" is for a debugger.
test: $(venv)/.test $(core)
	$(bin)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

bench: $(venv)/.test $(core)
	$(bin)/python benchmarks/run.py $(ARGS)

docs: $(venv)/.docs $(core)
	$(bin)/python -m sphinx -W --keep-going -q -d $(build)/doctrees sphinx build/docs
	@echo 'pages are in build/docs/index.html'

wheel: $(venv)/.wheel
	rm -rf $(build)/wheel wheelhouse
	$(bin)/python -m build --outdir $(build)/wheel
	$(bin)/auditwheel show $(build)/wheel/*.whl
	PATH="$(abspath $(bin)):$$PATH" $(bin)/auditwheel repair --wheel-dir wheelhouse $(build)/wheel/*.whl
	cp $(build)/wheel/*.tar.gz wheelhouse/
	$(bin)/abi3audit --strict --summary wheelhouse/hydrax-*-abi3-*.whl

# --- for developers -------------------------------------------------------------------------------

check: lint types sanitize test

lint: $(venv)/.dev
	$(bin)/ruff check $(py_files)
	$(bin)/ruff format --check $(py_files)
	$(bin)/clang-format --dry-run -Werror $(c_files)
	HYDRAX_WERROR=1 $(bin)/python setup.py --quiet build_ext --force \
		--build-temp $(build)/werror --build-lib $(build)/werror

types: $(venv)/.dev
	$(bin)/mypy

format: $(venv)/.dev
	$(bin)/ruff check --fix-only $(py_files)
	$(bin)/ruff format $(py_files)
	$(bin)/clang-format -i $(c_files)

# The core needs no Python: a C program drives it with threads in the part of workers. Then the
# extension, built apart from the usual one; leaks are not looked for, Python itself has some.
sanitize_flags := -std=c11 -D_GNU_SOURCE -O1 -g -fno-omit-frame-pointer -Wall -Wextra -Werror -pthread

sanitize: $(build)/stress-thread $(build)/stress-address $(build)/asan/made $(venv)/.test
	$(build)/stress-thread
	$(build)/stress-address
	LD_PRELOAD="$(foreach lib,libasan.so libstdc++.so,$(shell $(CC) -print-file-name=$(lib)))" ASAN_OPTIONS=detect_leaks=0 \
		HYDRAX_STRESS_BATCHES=1000 PYTHONPATH=$(build)/asan \
		$(bin)/python -P -m pytest tests -m sanitize $(ARGS)

$(build)/stress-thread: $(c_files) Makefile
	@mkdir -p $(@D)
	$(CC) $(sanitize_flags) -fsanitize=thread -Icsrc $(core_sources) $(stress) -o $@

$(build)/stress-address: $(c_files) Makefile
	@mkdir -p $(@D)
	$(CC) $(sanitize_flags) -fsanitize=address,undefined -fno-sanitize-recover=undefined \
		-Icsrc $(core_sources) $(stress) -o $@

$(build)/asan/made: setup.py pyproject.toml $(sources) $(wildcard hydrax/*.py hydrax/*/*.py) | $(venv)/.test
	rm -rf $(@D) build/sanitize
	HYDRAX_SANITIZE=1 $(pip) --no-build-isolation --no-deps --target $(@D) .
	@touch $@

clean:
	rm -rf .venv build dist wheelhouse *.egg-info $(core)
