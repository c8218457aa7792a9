# make demo | dev | check | test | test-levels | test-transformers | test-lowest | test-sglang | test-vllm | bench | clean
#
# A machine with python3 >= 3.11 (with venv and headers), g++ >= 11 and make needs nothing else. All goes into .venv.
#
#   PYTHON=python3.12      the interpreter that .venv is made from
#   TORCH="torch==2.12.0"  what pip is asked for; without it PYTHON's own torch is used if it has one that is new enough
#   PIP_ARGS="--no-index --find-links wheels"  for every call of pip

PYTHON ?= python3
# Found now: once .venv is there, its own python3 comes first in PATH.
THEIRS := $(shell command -v "$(PYTHON)")
TORCH ?=
TORCH_VERSION := 2.13.0
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq $(PIP_ARGS)
# The lists stand in pyproject.toml alone.
LISTED = $(BIN)/python -c 'import functools, tomllib; print(*functools.reduce(dict.get, "$(1)".split("/"), tomllib.load(open("pyproject.toml", "rb"))), sep="\n")'
NATIVE := $(shell find native -type f)

export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo dev check test test-levels test-transformers test-lowest test-sglang test-vllm bench sanitize clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	ktinject run examples/models/tiny-deepseek-v3

dev: $(VENV)/dev

# Several processes: most tests compute on one thread, and many wait for a process of their own, so there is one process
# more than cores on a small machine. Each begins with a run of tests that lie together, so what the tests of a file share
# is made once. GPUs are hidden from such a run: `pytest -m gpu` runs the tests that need one. A nightly run has those that
# TESTS leaves out: make test TESTS="not gpu".
TEST_PROCESSES ?= 3
TESTS ?= not gpu and not nightly
# Two runs at once share nothing: each writes results of its own, and the last to end gives them the name that is read.
# Torch's OpenMP threads would spin while they wait, which on few and shared cores takes minutes.
test: export OMP_WAIT_POLICY := PASSIVE
# Many tests start a process that imports this package; only the first of them should compile it.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/dev
	python -m pytest -q -n $(TEST_PROCESSES) --dist worksteal -m "$(TESTS)" -p no:cacheprovider --junitxml=build/test-results.$$$$.xml; \
	status=$$?; mv -f build/test-results.$$$$.xml build/test-results.xml; exit $$status

# What computes, at each instruction level that this CPU has; the software model of AMX's tiles stands in for AMX where
# there is none. LEVELS="avx2 avx512" names them.
LEVELS ?=
HAD := from ktinject import _native; had = [row["name"] for row in _native.levels() if row["available"]]; \
  print(*(name for name in had if name != "modelled_amx" or "amx" not in had))
test-levels: $(VENV)/dev
	@failed=; for level in $(or $(LEVELS),$$(python -c '$(HAD)')); do \
	  echo "level $$level"; \
	  KTINJECT_KERNEL=$$level $(MAKE) --no-print-directory test TESTS="numeric and not gpu and not nightly" \
	    || failed="$$failed $$level"; \
	done; [ -z "$$failed" ] || { echo "failed at:$$failed" >&2; exit 1; }

# TRANSFORMERS: oldest, newest or a number, of the versions that pyproject.toml allows.
TRANSFORMERS ?= oldest
export PIP_ARGS TEST_PROCESSES
test-transformers: $(VENV)/dev
	.ci/test_transformers $(TRANSFORMERS)

# All that this package needs, at the lowest versions that pyproject.toml allows; they go into build/.
test-lowest: $(VENV)/dev
	.ci/test_lowest

# SGLang and vLLM go into build/.
test-sglang test-vllm: $(VENV)/dev
	.ci/$(subst -,_,$@)

# mypy gets the package as it is installed: three folders as one. As modules, since what PYTHON already had is not in
# .venv/bin.
check: $(VENV)/dev
	python -m ruff check .
	python -m ruff format --check .
	mkdir -p build/typed/ktinject
	ln -sfn $(addprefix ../../../,operators optimize_rules $(wildcard ktinject/*)) build/typed/ktinject/
	cd build/typed && python -m mypy --config-file ../../pyproject.toml
	python -c 'import clang_format; clang_format.clang_format()' --dry-run -Werror $(filter %.cpp %.hpp %.inl %.cu %.cuh,$(NATIVE))
	$(MAKE) --no-print-directory -j 2 build/odr/checked

# Two types of one name are an error that only a linker can see, and only where the compiler has told it of types: -flto. At
# -O0 that takes half a minute at first, then what the changed files take. CUDA's parts are seen by their headers.
ODR := $(patsubst native/%.cpp,build/odr/%.o,$(filter-out native/bindings/% native/cuda/%,$(filter %.cpp,$(NATIVE))))
ODR_FLAGS := -std=c++20 -fPIC -O0 -flto -Wno-psabi
build/odr/%.o: native/%.cpp
	@mkdir -p $(@D)
	$(CXX) $(ODR_FLAGS) -Inative -MMD -c $< -o $@
build/odr/checked: $(ODR)
	$(CXX) $(ODR_FLAGS) -Werror=odr -shared $^ -o $@.so
	@touch $@
-include $(ODR:.o=.d)

bench: $(VENV)/installed
	python benchmarks/bench_moe.py

# The native core alone under ASan with UBSan, and under TSan. CHURN=100000 for the long run.
CHURN ?= 300
sanitize:
	for kind in address,undefined thread; do \
	  cmake -S . -B build/native-$$kind -DKTINJECT_NATIVE_TESTS=ON -DKTINJECT_CUDA=OFF -DKTINJECT_SANITIZE=$$kind \
	  && cmake --build build/native-$$kind -j 2 \
	  && for mode in forward plan pool teardown writes fuzz exit dispatcher sharing allocations "churn $(CHURN)"; do \
	    TSAN_OPTIONS=die_after_fork=0 build/native-$$kind/native_test $$mode || exit 1; \
	  done || exit 1; \
	done

clean:
	rm -rf $(VENV) build
	rm -f ktinject/_native*.so

# What is missing is said before anything is downloaded, in Python that old interpreters understand.
define CHECK
import os, shutil, subprocess, sys, sysconfig
def missing():
    if sys.version_info < (3, 11):
        yield "%s is Python %d.%d; 3.11 or newer is needed: make PYTHON=..." % ((sys.executable,) + sys.version_info[:2])
        return
    from importlib.util import find_spec
    if not all(find_spec(name) and find_spec(name + ".__main__") for name in ("venv", "ensurepip")):
        yield "%s has no venv. Debian and Ubuntu: apt-get install python3-venv" % sys.executable
    if not os.path.exists(os.path.join(sysconfig.get_config_var("INCLUDEPY"), "Python.h")):
        yield "%s has no headers. Debian and Ubuntu: apt-get install python3-dev" % sys.executable
    compiler = next(filter(shutil.which, [os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++"]), None)
    if compiler is None:
        yield "there is no C++ compiler. Debian and Ubuntu: apt-get install g++"
        return
    asked = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True)  # clang knows no such option
    if asked.returncode == 0 and int(asked.stdout.split(".")[0]) < 11:
        yield "%s is g++ %s; 11 or newer is needed: make CXX=..." % (compiler, asked.stdout.strip())
sys.exit("\n".join(missing()) or 0)
endef
export CHECK

# A torch that python3 has is used, not replaced: on a GPU machine it is the one that fits the driver. Pip says whether it
# is new enough. Where python3 is itself a virtual environment's, --system-site-packages does not reach its packages; a
# .pth file does, with the folders of the package and of its metadata, which differ in an editable install. The old
# setuptools that venv brings would hide theirs.
#
# Later calls of pip must keep this torch. They get its version as a constraint, and as pip knows it: from the metadata of
# the distribution. torch.__version__ may say more, such as 2.13.0+cu130 where the distribution is called 2.13.0, and pip
# would look for a distribution of that name.
#
# A pip that Ctrl-C ends exits as one that fails: without the trap, some shells would go on with the next alternative.
REQUIRED_TORCH = $(call LISTED,project/dependencies) | grep '^torch'
VERSION_OF_TORCH = $(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))'
FOLDERS_OF_TORCH := import importlib.metadata as m, torch; \
  print(*{str(m.distribution("torch").locate_file("")), torch.__path__[0].rpartition("/")[0]}, sep="\n")

$(VENV)/torch:
	@[ -n "$(THEIRS)" ] || { echo 'There is no $(PYTHON). Name another interpreter: make PYTHON=...' >&2; exit 1; }
	@"$(THEIRS)" -c "$$CHECK"
	@trap 'exit 130' INT; \
	rm -rf $(VENV); \
	if [ -z '$(TORCH)' ] && "$(THEIRS)" -c 'import torch' 2>/dev/null; then \
	  "$(THEIRS)" -m venv --system-site-packages $(VENV) \
	  && "$(THEIRS)" -c '$(FOLDERS_OF_TORCH)' \
	    > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/theirs.pth" \
	  && $(BIN)/python -m pip uninstall -qq --yes setuptools \
	  && PIP_CONFIG_FILE=/dev/null $(BIN)/python -m pip --isolated install -qq --no-index --no-deps "$$($(REQUIRED_TORCH))" \
	    2>/dev/null \
	  && echo "Using torch $$($(VERSION_OF_TORCH)) of $(THEIRS)." \
	  || { echo "The torch of $(THEIRS) is not $$($(REQUIRED_TORCH)) for pip; another one is installed."; rm -rf $(VENV); }; \
	fi
	@trap 'exit 130' INT; \
	[ -e $(VENV) ] || { \
	  "$(THEIRS)" -m venv $(VENV) || exit; \
	  if [ -n '$(TORCH)' ]; then echo 'Installing $(TORCH).'; $(PIP) $(TORCH); \
	  elif command -v nvidia-smi >/dev/null; then \
	    echo 'Installing torch $(TORCH_VERSION) with CUDA, several GB, for the NVIDIA driver that is here.'; \
	    $(PIP) torch==$(TORCH_VERSION); \
	  else \
	    echo 'Installing torch $(TORCH_VERSION), its CPU build.'; \
	    $(PIP) torch==$(TORCH_VERSION)+cpu 2>/dev/null \
	    || $(PIP) --index-url $(TORCH_CPU_INDEX) torch==$(TORCH_VERSION) 2>/dev/null \
	    || { echo 'No CPU build is found. Installing the one of the package index, which may bring CUDA, several GB.'; \
	      $(PIP) torch==$(TORCH_VERSION); }; \
	  fi; \
	}
	@version=$$($(VERSION_OF_TORCH)) && echo "torch==$$version" > $@.part
	@mv $@.part $@

$(VENV)/build-requirements: $(VENV)/torch pyproject.toml
	$(call LISTED,build-system/requires) > $@.txt
	$(PIP) -r $@.txt
	touch $@

# Without isolation: a second set of build requirements would be installed for every build. With what `ktinject serve` needs.
$(VENV)/installed: $(VENV)/build-requirements pyproject.toml setup.py CMakeLists.txt $(NATIVE)
	$(PIP) --no-build-isolation --constraint $(VENV)/torch --editable '.[serve]'
	touch $@

$(VENV)/dev: $(VENV)/installed pyproject.toml
	$(call LISTED,project/optional-dependencies/dev) > $@.txt
	$(PIP) --constraint $(VENV)/torch -r $@.txt
	touch $@
