PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# Packages that only some tests use, and these tests.
EXTRAS := $(CURDIR)/$(VENV)/extras
EXTRAS_INSTALLED := $(VENV)/.extras_installed
EXTRAS_TESTS := tests/strategy/test_quantised.py tests/strategy/test_quantised_in_parallel.py tests/strategy/test_float8.py \
	tests/kernels/test_liger.py tests/kernels/test_triton_kernels.py tests/estimate/test_estimate_quantized_training.py
WORKERS := -n 2 --dist worksteal
# `make test-slow test-cuda PART=2/36` runs the second one of 36 parts of the cases that repeat what `make test` covers, and
# one of 4 parts of the few cases with late copies.
PARTED = $(if $(PART),--part $(PART))
PARTED_LATE = $(if $(PART),--part $$(($(firstword $(subst /, ,$(PART))) % 4 + 1))/4)
# The environment with the CUDA build of torch and the emulated device.
CUDA_VENV := .cuda/venv
CUDA_RUN := $(CUDA_VENV)/bin/python
CUDA_INSTALLED := $(CUDA_VENV)/.installed
CUDA_HEADERS := .cuda/toolkit/nvidia/cu13/include
# The environment with the newest torch that is supported.
NEWEST_TORCH := $(patsubst torch==%,%,$(shell cat tests/newest_torch.txt))
NEWEST_VENV := .cuda/newest
NEWEST_RUN := $(NEWEST_VENV)/bin/python
NEWEST_INSTALLED := $(NEWEST_VENV)/.installed
NEWEST_TESTS := tests/parallel/zero tests/parallel/pipeline/test_pipeline_zero.py \
	tests/parallel/pipeline/zero_bubble/test_zero_bubble.py tests/allocator

.PHONY: demo test test-slow test-cuda test-newest lint docs dist release bench-cpu cuda-headers

# One thread computes, which leaves a core to the thread that copies. More threads gain little at this size and lose much
# while other programs run.
demo: $(INSTALLED)
	OMP_NUM_THREADS=1 $(RUN) -m lightning_memo.train experiment=demo

# One thread per worker, because the tests compare numbers bit by bit and share the cores. Each worker runs consecutive
# files, so that fixtures and process pools are reused, and takes half of the other's remaining tests when it has finished.
# Bytecode is cached even if the environment forbids it, because the tests start hundreds of processes.
#
# The cases that are marked slow combine settings that others cover one by one, draw more at random, or run a benchmark.
test test-slow: export EXTRAS_REQUIRED = 1
test test-slow: export OMP_NUM_THREADS = 1
test test-slow: export PYTHONDONTWRITEBYTECODE =
test: $(INSTALLED)
	$(RUN) -m pytest $(WORKERS) -m "not slow" tests $(EXTRAS_TESTS:%=--ignore=%)

test-slow: $(INSTALLED) $(EXTRAS_INSTALLED)
	$(RUN) -m pytest $(WORKERS) $(PARTED) -m slow tests $(EXTRAS_TESTS:%=--ignore=%)
	PYTHONPATH=$(EXTRAS) $(RUN) -m pytest $(WORKERS) $(PARTED) $(EXTRAS_TESTS)

# Tests on an emulated GPU, see tests/emulated_cuda/README.md. Those of the last two commands also run on the CPU, where the
# slow cases combine more settings. With the last one, copies and kernels are late at random: `make test-cuda SEED=7` repeats
# the delays of a run, as far as the threads of the machine let it.
SEED ?= $(shell date +%s)
test-cuda: export OMP_NUM_THREADS = 1
test-cuda: export PYTHONDONTWRITEBYTECODE =
test-cuda: export EMULATED_CUDA_DEVICES = 4
test-cuda: $(CUDA_INSTALLED)
	$(CUDA_RUN) tests/emulated_cuda/build.py $(CUDA_HEADERS)
	$(CUDA_RUN) -m pytest $(WORKERS) -m "not slow" tests/emulated_cuda tests/gpu
	$(CUDA_RUN) -m pytest $(WORKERS) $(PARTED) -m slow tests/emulated_cuda tests/gpu
	PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True $(CUDA_RUN) -m pytest $(WORKERS) -m "not slow" \
		tests/gpu/test_cuda_allocator.py tests/gpu/test_cuda_allocator_training.py
	TEST_DEVICE=cuda $(CUDA_RUN) -m pytest $(WORKERS) $(PARTED) -m "not slow" $$(grep -v '^#' tests/emulated_cuda/also_on_cuda.txt)
	grep -v '^#' tests/emulated_cuda/late_on_cuda.txt | TEST_DEVICE=cuda EMULATED_CUDA_COPY_DELAY_US=5000 \
		EMULATED_CUDA_KERNEL_DELAY_US=200 EMULATED_CUDA_SEED=$(SEED) xargs -d '\n' $(CUDA_RUN) -m pytest $(WORKERS) $(PARTED_LATE)

# Tests of what uses most of torch's private parts, with the newest torch.
test-newest: export OMP_NUM_THREADS = 1
test-newest: export PYTHONDONTWRITEBYTECODE =
test-newest: export EMULATED_CUDA_DEVICES = 0
test-newest:
	@if $(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))"; then \
		$(MAKE) $(NEWEST_INSTALLED) && $(NEWEST_RUN) -m pytest $(WORKERS) -m "not slow" $(NEWEST_TESTS); \
	else echo "test-newest: skipped, torch $(NEWEST_TORCH) needs Python 3.11 or newer"; fi

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# Builds the site into site/. A broken link, picture or reference is an error.
docs: $(INSTALLED)
	$(RUN) -m mkdocs build --strict

# The source distribution, and the wheel that is made from it, in dist/.
dist: $(INSTALLED)
	rm -rf dist
	$(RUN) -m build --no-isolation

release:
	.ci/release "$(VERSION)"

bench-cpu: $(INSTALLED)
	$(RUN) benchmarks/engine.py
	$(RUN) benchmarks/allocator.py

# Downloads the parts of the CUDA builds of torch that the tests of the CUDA allocator need: about 100 MB in .cuda/.
cuda-headers: $(INSTALLED)
	$(RUN) tests/support/cuda_stub/fetch.py

# torch is installed first, with a pinned version: with a range, pip may download several multi-gigabyte builds.
$(INSTALLED): setup.cfg pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -c "import torch" 2>/dev/null || $(RUN) -m pip install torch==2.13.0
	$(RUN) -m pip install -e ".[dev,docs,peft,datasets,trainer,notebooks,slurm]"
	touch $@

# If bitsandbytes and torchao are found, transformers and PEFT import them, which takes seconds in each process, and Triton
# has a gigabyte. They are therefore installed into a separate folder. Their dependencies are installed already.
$(EXTRAS_INSTALLED): $(INSTALLED)
	$(RUN) -m pip install --no-deps --upgrade --target $(EXTRAS) "bitsandbytes>=0.50" "torchao>=0.18" "triton>=3.6" \
		"liger-kernel>=0.8,<0.9"
	touch $@

# The CUDA build of torch without NVIDIA's libraries, for which the emulated device stands in, and without its version of
# Triton. Its metadata is changed, so that pip does not install them later.
$(CUDA_INSTALLED): setup.cfg pyproject.toml tests/emulated_cuda/pyproject.toml $(INSTALLED)
	test -d $(CUDA_HEADERS) || $(RUN) tests/support/cuda_stub/fetch.py
	test -x $(CUDA_RUN) || $(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_RUN) -m pip install --no-deps "torch===2.13.0"
	sed -i -E '/^Requires-Dist: (cuda|nvidia|triton)/d' $(CUDA_VENV)/lib/python3*/site-packages/torch-2.13.0.dist-info/METADATA
	$(CUDA_RUN) -m pip install -e ".[dev,peft,trainer]" "torch===2.13.0" "liger-kernel>=0.8,<0.9"
	$(CUDA_RUN) -m pip install -e tests/emulated_cuda
	touch $@

# The newest torch for tests on the CPU. PyPI has only its CUDA build, which is installed as above.
$(NEWEST_INSTALLED): setup.cfg pyproject.toml tests/newest_torch.txt
	test -x $(NEWEST_RUN) || $(PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_RUN) -m pip install --no-deps -r tests/newest_torch.txt
	sed -i -E '/^Requires-Dist: (cuda|nvidia|triton)/d' \
		$(NEWEST_VENV)/lib/python3*/site-packages/torch-$(NEWEST_TORCH).dist-info/METADATA
	$(NEWEST_RUN) -m pip install -e ".[dev,peft,trainer]" -r tests/newest_torch.txt
	test -d $(CUDA_HEADERS) || $(NEWEST_RUN) tests/support/cuda_stub/fetch.py
	$(NEWEST_RUN) tests/emulated_cuda/build.py --no-operators $(CUDA_HEADERS)
	touch $@
