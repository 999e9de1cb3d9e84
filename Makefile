# `make demo` and `make test` set up everything they need; repeated, they start at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NEWEST := build/newest

.PHONY: demo test test-slow test-gpu test-newest drills lint docs docs-links bench pictures results dist clean

demo: $(READY)
	$(BIN)/ripple demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q

test-slow: $(READY)
	$(BIN)/python -m pytest -q -m slow

test-gpu: $(READY)
	$(BIN)/python -m pytest -q -m 'slow or not slow' tests/library/test_cuda.py tests/lab/test_detector_kernels.py tests/lab/test_augment.py

drills: $(READY)  # up to an hour: kills, full disks, damaged files, two hosts; a part needs root
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m drills

test-newest: $(READY)  # the library with the newest versions of what it needs
	rm -rf $(NEWEST)
	$(PYTHON) -m venv $(NEWEST)
	$(BIN)/uv pip install --quiet --python $(NEWEST)/bin/python --editable '.[dev]'
	$(BIN)/uv pip list --python $(NEWEST)/bin/python | grep -E '^(torch|triton|timm|numpy|lightning) '
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -n 2 --dist worksteal -q tests/library

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/sphinx-build -q -E -W --keep-going docs build/docs
	@echo "The documentation is in build/docs/index.html"

docs-links: $(READY)  # asks other servers, so it is no part of the tests
	$(BIN)/sphinx-build -q -E -W --keep-going -b linkcheck docs build/docs-links

bench: $(READY)
	$(BIN)/ripple bench op

pictures: $(READY)
	$(BIN)/ripple picture docs/images/ripples.png
	$(BIN)/ripple bench plot benchmarks/results/op-nvidia-h200-bfloat16.csv docs/images/op-gpu.png
	$(BIN)/ripple bench plot benchmarks/results/model-nvidia-h200-bfloat16.csv docs/images/models-gpu.png
	$(BIN)/ripple demo --output runs/demo
	$(BIN)/ripple analyze runs/demo --output build/analysis
	cp build/analysis/weights.png docs/images/learned.png

dist: $(READY)  # a wheel and an sdist, checked, and the wheel tried alone
	rm -rf dist build/alone
	$(BIN)/uv build --quiet
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/alone
	$(BIN)/uv pip install --quiet --python build/alone/bin/python dist/*.whl
	cd build/alone && bin/python ../../tests/smoke.py

results: $(READY)  # counts the networks, then fills the blocks of README and docs
	$(BIN)/python -m ripple_lab.reproduce.networks
	$(BIN)/python -m ripple_lab.reproduce

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ripple-attention needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
