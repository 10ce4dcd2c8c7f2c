# make train   trains a small model with the default method    make test    lint, then every test
# make lint    ruff and mypy                                   make format  what ruff would write
# make docs    the documentation, into site/
# make clean   caches, builds and the marks of a finished set-up; runs/ and environments stay
#
# Each does its own set-up, once, in .venv. VENV=path uses that environment instead and keeps the torch it has.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PY = $(VENV)/bin/python

EXTRAS_train = train
EXTRAS_dev = train,elastic,hf,lightning,docs,dev

.PHONY: train test lint format docs clean
.DELETE_ON_ERROR:

train: $(VENV)/.thinwire-train
	$(VENV)/bin/thinwire train $(ARGS)

# One thread per test worker: two workers, and the processes that tests start, share two cores.
test: export OMP_NUM_THREADS = 1
test: lint
	$(PY) -m pytest -n 2 $(ARGS)

lint: $(VENV)/.thinwire-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.thinwire-dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(VENV)/.thinwire-dev
	$(PY) -m mkdocs build --strict

# Some distributions ship venv without pip: then the pip at hand installs one.
$(PY):
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(VENV)/bin/python install --quiet pip; }

# A given environment that has a torch keeps it; every other takes the one of constraints.txt.
$(VENV)/.thinwire-%: pyproject.toml constraints.txt | $(PY)
	@echo "Setting up $(VENV) for thinwire, once; this can take some minutes."
	@cp constraints.txt $(VENV)/.thinwire-constraints.txt
ifneq ($(origin VENV),file)
	@$(PY) -c "import importlib.metadata as m; print('torch==' + m.version('torch'))" \
	  > $(VENV)/.thinwire-torch 2>/dev/null \
	  && mv $(VENV)/.thinwire-torch $(VENV)/.thinwire-constraints.txt || rm -f $(VENV)/.thinwire-torch
endif
	$(PY) -m pip install --quiet --constraint $(VENV)/.thinwire-constraints.txt --editable '.[$(EXTRAS_$*)]'
	@touch $@

clean:
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(VENV)/.thinwire-train $(VENV)/.thinwire-dev $(VENV)/.thinwire-constraints.txt
	find . -path './.*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
