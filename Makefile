# make help says what there is. Everything below works as root and as a user, and a second time in seconds.
#
# VENV         where the environment lives (.venv). `make build PYTHON=python3 VENV=` uses the host's Python as it is: builds in
#              the checkout, installs nothing, needs no network.
# PYTHON       the Python that makes the environment, or that is the environment when VENV is empty
# RANKS        how many processes `make bench` starts (4)
# TORCH_INDEX  an index to take torch from, where the default one has the wrong build (for example the CPU build's)
# CMAKE_ARGS   more options for CMake, for example -DPPLX_CUDA=ON: kernels for any GPU, where there is none, too
# WORKERS      processes that run tests side by side (two more than cores, since some tests wait)
VENV ?= .venv
PYTHON ?= python3
TORCH_INDEX ?=
CMAKE_ARGS ?=
BUILD := build/dev
RANKS ?= 4
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n + 2 : 8)))

# The host's mpirun may be Open MPI's, which otherwise refuses root (containers) and more ranks than cores. MPICH ignores these.
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
export OMPI_MCA_rmaps_base_oversubscribe ?= 1
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
.DELETE_ON_ERROR:
.PHONY: build tests-built test test-all test-drawn bench two-hosts docs stubs lint machine-code machine-code-drawn carrier-calls mutants \
    mutants-drawn mutants-carrier cpp sanitizers sanitizers-drawn cpp-and-tsan cpp-asan cpp-tsan sim sim-long check check-long \
    check-serving serving-drawn serving-vllm serving-sglang serving-training serving-kernels wheel wheel-stages \
    clean help

ifeq ($(strip $(VENV)),)
# Not `command -v`: python3 may be a wrapper script, and CMake wants the interpreter.
PY := $(shell $(PYTHON) -c 'import sys; print(sys.executable)')
deps :=
ninja := $(if $(shell command -v ninja),-G Ninja)
else
PY := $(abspath $(VENV))/bin/python
# cmake, ninja and mpirun may be the environment's own.
export PATH := $(abspath $(VENV))/bin:$(PATH)
deps := $(VENV)/.deps
installed := $(VENV)/.editable
ninja := -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja
# A count, and the time that is left.
export NINJA_STATUS ?= [%f/%t, %W left] #
endif

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# Without MAKEFLAGS: ninja cannot use the jobserver of make -j2.
build: $(deps) $(BUILD)/.configured $(installed)  ## environment, library and extension modules, in place
	MAKEFLAGS= cmake --build $(BUILD)

# The environment. A stamp, so that a warm make does no pip work.
$(VENV)/.deps: constraints.txt tools/install_deps.sh
	PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" tools/install_deps.sh "$(VENV)"
	@touch $@

# An import hook and the metadata only: the modules are built in place below, by the same commands with and without a venv.
$(VENV)/.editable: pyproject.toml $(deps)
	$(PY) -m pip install --quiet --no-build-isolation --no-deps --editable . --config-settings=wheel.cmake=false
	@touch $@

# Configured again when the interpreter or the options change; CMake itself notices everything else.
configure := -DPPLX_PYTHON=ON -DPPLX_TESTS=ON -DPPLX_PYTHON_INTERPRETER=$(PY) $(ninja) $(CMAKE_ARGS)
ifneq ($(configure),$(shell cat $(BUILD)/.configured 2>/dev/null))
.PHONY: $(BUILD)/.configured
endif
$(BUILD)/.configured: $(deps)
	cmake -S . -B $(BUILD) $(configure)
	@echo '$(configure)' > $@

# What pytest would build by itself, when it comes to it.
tests-built: build
	cmake --build $(BUILD) --target pplx_tests

pytest = $(PY) -m pytest --junitxml=build/tests/$@.xml
side_by_side := -n $(WORKERS) --dist loadfile

test: tests-built  ## the tests, without the slow ones
	$(pytest) $(side_by_side)

test-all: tests-built  ## the tests with the slow ones
	$(pytest) $(side_by_side) -m 'not long'

# conftest.py says what it draws. Those of C++ are in one of sanitizers-drawn.
drawn := PPLX_TEST_DRAWN=8
test-drawn: build  ## those in Python, but of slow tests and of variants of a test an eighth, others at each commit
	cmake --build $(BUILD) --target pplx_python_tests
	$(drawn) $(pytest) $(side_by_side) -m 'not long' --deselect tests/unit/test_cpp.py::test_cpp

layer := --tokens 1,8,32,128 --hidden 7168 --experts 256 --top-k 8 --wire fp8
bench: build  ## latency beside the floor: of four processes on this host, then of its GPUs where it has two or more
	mpirun -n $(RANKS) $(PY) bench/latency.py $(layer) --transport mapped,proxy:shm,proxy:tcp
	gpus=$$($(PY) -c 'import torch; print(torch.cuda.device_count())'); \
	    test $$gpus -lt 2 || $(PY) bench/latency.py -n $$gpus --device cuda $(layer)

two-hosts: build  ## two network namespaces as two hosts: what docs/across-nodes.md says (root only)
	tools/two_hosts.sh $(PY) examples/hosts.py

docs: build  ## writes what is generated in docs/: the API reference, the tables of settings and deadlines
	$(PY) tools/make_docs.py

# That of _cuda is taken from the emulation of the kernels, which is for x86-64.
emulation := $(if $(filter x86_64,$(shell uname -m)),pplx_emulation)
make_stubs = $(if $(emulation),cmake --build $(BUILD) --target $(emulation) &&) \
    $(PY) tools/stubs.py $(1) $(if $(emulation),--cuda $(BUILD)/tests/emulation/_cuda*.so)

stubs: build  ## the .pyi files of the extension modules, as the modules give them
	$(call make_stubs)

lint: build  ## ruff, mypy, allowed imports, the voice of comments, and whether the .pyi files are up to date
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) tools/voice.py
	$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' --no-cache
	$(call make_stubs,--check)

# 5 s when nothing has changed. Its tools are from PyPI and lie in build/.
machine-code: $(deps)  ## what the kernels compile to: loads that overlap, sizes, spills
	$(PY) tools/machine_code.py

machine-code-drawn: $(deps)  ## this for a part of their files, others at each commit
	$(PY) tools/machine_code.py --drawn

# Minutes: each kernel once more, with the carrier's calls in it.
carrier-calls: $(deps)  ## what kernels and the host side of transport="nvshmem" ask of NVSHMEM: nothing that waits
	$(PY) tools/carrier_calls.py

mutants: build  ## plants protocol bugs, one at a time, and shows that the tests catch each
	$(PY) tests/mutants/run.py
	$(if $(emulation),$(PY) tests/mutants/run_emulation.py --core)

mutants-drawn: build  ## some of these, others at each commit
	$(PY) tests/mutants/run.py --drawn
	$(if $(emulation),$(PY) tests/mutants/run_emulation.py --core --drawn)

mutants-carrier: tests-built  ## the same for all that kernels promise the proxy, and carriers that they drive: ten minutes
	$(PY) tests/mutants/run_emulation.py

cpp: build  ## the C++ tests
	cmake --build $(BUILD) --target pplx_cpp_tests
	ctest --test-dir $(BUILD) --output-on-failure

# Every kind of fault must have happened a hundred times, or the seeds say nothing about it.
sim: build  ## the simulation: 5,000 seeds of a hostile network
	cmake --build $(BUILD) --target pplx_sim
	$(BUILD)/sim --seeds 5000 --jobs 2 --at-least 100

# Goes on where it stopped: the state file has the next seed and the totals.
sim-long: build  ## a million seeds of it, in the background's share of one core
	cmake --build $(BUILD) --target pplx_sim
	nice -n 19 $(BUILD)/sim --long 1000000 --resume build/sim-long.state

# The C++ tests again under sanitizers, in trees without Python.
define sanitized
	cmake -S . -B build/$(1) $(ninja) \
	    -DPPLX_PYTHON=OFF -DPPLX_TESTS=ON -DPPLX_SANITIZE=$(2)
	cmake --build build/$(1) --target pplx_cpp_tests
	ctest --test-dir build/$(1) --output-on-failure -j2
endef

sanitizers:  ## the C++ tests under AddressSanitizer and UBSan, and under ThreadSanitizer, side by side
	$(MAKE) -j2 --no-print-directory --output-sync=target cpp-asan cpp-tsan

cpp-and-tsan: cpp cpp-tsan

sanitizers-drawn: build  ## one of the two, by the commit: AddressSanitizer, or no sanitizer and then ThreadSanitizer
	$(MAKE) --no-print-directory $$($(PY) tools/drawn.py cpp-asan cpp-and-tsan)

cpp-asan: $(deps)  ## the C++ tests under AddressSanitizer and UBSan
	$(call sanitized,asan,address$(comma)undefined)

cpp-tsan: $(deps)  ## the C++ tests under ThreadSanitizer
	$(call sanitized,tsan,thread)

comma := ,

check:  ## everything that a change must pass, and what CI runs; how long each part took
	$(PYTHON) tools/check.py build lint machine-code-drawn sim mutants-drawn sanitizers-drawn test-drawn serving-drawn

# When it was last run stands in tests/README.md.
check-long: tests-built machine-code sanitizers carrier-calls mutants mutants-carrier check-serving  ## what `make check` leaves out: an hour
	PPLX_TEST_VOLUME=10 $(pytest) $(side_by_side) -m 'long or not long' tests/emulation tests/efa

# The environments of the engines are made once and kept: tools/serving_env.sh says where.
serving_env = $$(PYTHON="$(PY)" TORCH_INDEX="$(TORCH_INDEX)" tools/serving_env.sh $(1))
serving_tests = $(pytest) -m 'not long' $(1:%=tests/serving/test_%.py)
two_at_once := -j2 --no-print-directory --output-sync=line
check-serving: build  ## on CPUs: vLLM, SGLang, torchtitan and Megatron-Core over this library; its Triton kernels in their interpreter
	$(MAKE) $(two_at_once) serving-kernels serving-vllm serving-sglang serving-training

serving-drawn: build  ## the tests that are drawn of the kernels, and of one of the three environments by the commit
	$(drawn) $(MAKE) $(two_at_once) serving-kernels $$($(PY) tools/drawn.py serving-vllm serving-sglang serving-training)

serving-vllm:
	PPLX_SERVING_PYTHON=$(call serving_env,vllm) $(call serving_tests,engines kernels register)

serving-sglang:
	PPLX_SGLANG_PYTHON=$(call serving_env,sglang) $(call serving_tests,sglang)

serving-training:
	PPLX_TRAINING_PYTHON=$(call serving_env,training) $(call serving_tests,loops training)

serving-kernels:
	$(call serving_env,training) -m pytest --junitxml=build/tests/$@.xml -m 'not long' tests/ranks/test_moe_kernels.py

wheel: $(deps)  ## a wheel in dist/, with kernels for any GPU
	CMAKE_ARGS="-DPPLX_CUDA=ON $(CMAKE_ARGS)" $(PY) -m pip wheel --no-build-isolation --no-deps --wheel-dir dist .

wheel-stages: $(deps)  ## a second wheel in dist/, for timelines with the stages of kernels
	CMAKE_ARGS="$(CMAKE_ARGS)" $(PY) -m pip wheel --no-build-isolation --no-deps --wheel-dir dist tools/stages

clean:  ## what was built; the environment stays
	rm -rf build dist pplx_comm/*.so pplx_comm/efasoft/lib pplx_comm/_version.py
