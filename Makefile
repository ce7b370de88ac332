# demo, test and docs make their own environment with $(PYTHON); the others use the Python as it is.
PYTHON ?= python3
VENV = .venv-$@
# With an NVIDIA driver: CuPy for its CUDA major version, and Numba.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p')
GPU_EXTRAS := $(if $(CUDA),$(shell echo ,cuda$(CUDA),numba))
SANITIZER = PYTHONPATH=. compute-sanitizer --error-exitcode 1 --tool
INSTALL = $(PYTHON) -m venv --clear $(VENV) && $(VENV)/bin/python -m pip install -q

.PHONY: demo test compile-check gpu-test gpu-status sanitize bench docs
demo:  ## watch exact tiled attention computed, checked and explained
	$(INSTALL) '.[demo$(GPU_EXTRAS)]' && $(VENV)/bin/python -m cuflash demo
test:  ## lint, types and every test that this machine can run
	$(INSTALL) '.[test$(GPU_EXTRAS)]'
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest
compile-check:  ## every row of the tile tables for every architecture: no spills; needs no GPU
	$(INSTALL) '.[test]' && $(VENV)/bin/python -m pytest tests/test_compile.py
# With pytest-xdist, PYTEST_ARGS='-n 16 -p no:benchmark' compiles side by side: minutes instead of a quarter of an hour.
gpu-test:  ## the suite on this machine's GPU; writes the record when all passed
	$(PYTHON) -m pytest --gpu-record tests/gpu_record.json $(PYTEST_ARGS)
gpu-status:  ## does the record match the sources?
	$(PYTHON) tests/gpu_record.py
# racecheck reports the Hopper kernels, where one lane arrives at a barrier for its warp (docs/kernels.md).
sanitize:  ## a short list of cases under each tool of compute-sanitizer
	$(SANITIZER) memcheck $(PYTHON) tests/sanitize.py
	$(SANITIZER) initcheck $(PYTHON) tests/sanitize.py portable
	$(SANITIZER) racecheck --kernel-name-exclude kns=sm90 $(PYTHON) tests/sanitize.py unclustered
	$(SANITIZER) synccheck $(PYTHON) tests/sanitize.py
bench:  ## the table and plot of the README
	$(PYTHON) -m bench
docs:  ## the HTML pages, in docs/_build
	$(INSTALL) '.[docs]' && $(VENV)/bin/sphinx-build -W -q -b html docs docs/_build
