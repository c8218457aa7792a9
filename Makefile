# make demo | dev | check | test | bench | clean
#
# A machine with python3 >= 3.11 (with venv), g++ >= 11 and make needs nothing else. All goes into .venv.
#
#   PYTHON=python3.12    the interpreter that .venv is made from
#   TORCH="torch==2.12"  what pip is asked for if PYTHON has no torch >= 2.11 of its own
#   PIP_ARGS="--no-index --find-links wheels"  for every call of pip

PYTHON ?= python3
# Found now: once .venv is there, its own python3 comes first in PATH.
THEIRS := $(shell command -v $(PYTHON))
TORCH ?=
PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq $(PIP_ARGS)
# The lists stand in pyproject.toml alone.
LISTED = $(BIN)/python -c 'import functools, tomllib; print(*functools.reduce(dict.get, "$(1)".split("/"), tomllib.load(open("pyproject.toml", "rb"))), sep="\n")'
NATIVE := $(shell find native -type f)

export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo dev check test bench sanitize clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	ktinject run examples/models/tiny-deepseek-v3

dev: $(VENV)/dev

# Torch's OpenMP threads would spin while they wait, which on few and shared cores takes minutes.
test: export OMP_WAIT_POLICY := PASSIVE
test: $(VENV)/dev
	python -m pytest -q --junitxml=build/test-results.xml

# mypy gets the package as it is installed: three folders as one.
check: $(VENV)/dev
	ruff check .
	ruff format --check .
	mkdir -p build/typed/ktinject
	ln -sfn $(CURDIR)/operators $(CURDIR)/optimize_rules $(wildcard $(CURDIR)/ktinject/*) build/typed/ktinject/
	cd build/typed && python -m mypy --config-file ../../pyproject.toml
	clang-format --dry-run -Werror $(filter %.cpp %.hpp %.inl %.cu %.cuh,$(NATIVE))

bench: $(VENV)/installed
	python benchmarks/bench_moe.py

# The native core alone under ASan with UBSan, and under TSan. CHURN=100000 for the long run.
CHURN ?= 300
sanitize:
	for kind in address,undefined thread; do \
	  cmake -S . -B build/native-$$kind -DKTINJECT_NATIVE_TESTS=ON -DKTINJECT_CUDA=OFF -DKTINJECT_SANITIZE=$$kind \
	  && cmake --build build/native-$$kind -j 2 \
	  && for mode in forward pool "churn $(CHURN)"; do \
	    TSAN_OPTIONS=die_after_fork=0 build/native-$$kind/native_test $$mode || exit 1; \
	  done || exit 1; \
	done

clean:
	rm -rf $(VENV) build
	rm -f ktinject/_native*.so

# A torch that is there is used, not replaced: on a GPU machine it is the one that fits the driver. Where PYTHON is
# itself a virtual environment's, --system-site-packages does not reach its packages; a .pth file does. The old
# setuptools that venv brings would hide theirs.
$(VENV)/torch:
	rm -rf $(VENV)
	if $(THEIRS) -c 'import torch; exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))' 2>/dev/null; then \
	  $(THEIRS) -m venv --system-site-packages $(VENV); \
  $(BIN)/python -m pip uninstall -qq --yes setuptools; \
	  $(THEIRS) -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' \
	    > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/theirs.pth"; \
	else \
	  $(THEIRS) -m venv $(VENV); \
	  if [ -n '$(TORCH)' ]; then $(PIP) $(TORCH); \
	  elif command -v nvidia-smi >/dev/null; then $(PIP) 'torch>=2.11'; \
	  else $(PIP) torch==2.13.0+cpu 2>/dev/null \
	    || $(PIP) --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 2>/dev/null \
	    || $(PIP) torch==2.13.0; \
	  fi; \
	fi
	$(BIN)/python -W ignore -c 'import torch; print(f"torch=={torch.__version__}")' > $@

$(VENV)/build-requirements: $(VENV)/torch pyproject.toml
	$(call LISTED,build-system/requires) > $@.txt
	$(PIP) -r $@.txt
	touch $@

# Without isolation: a second set of build requirements would be installed for every build.
$(VENV)/installed: $(VENV)/build-requirements pyproject.toml setup.py CMakeLists.txt $(NATIVE)
	$(PIP) --no-build-isolation --constraint $(VENV)/torch --editable .
	touch $@

$(VENV)/dev: $(VENV)/installed pyproject.toml
	$(call LISTED,project/optional-dependencies/dev) > $@.txt
	$(PIP) --constraint $(VENV)/torch -r $@.txt
	touch $@
