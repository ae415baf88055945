# `make demo` and `make test` are the README's commands, `make test-slow` is the second tier of tests.
# Each sets up what it needs in .venv; what is there already is not installed again.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
EMPTY  := $(VENV)/without-extras
DIST   := $(VENV)/dist
STAGE  := scripts/stage.sh
PIP    := $(BIN)/pip --disable-pip-version-check
# Python compiles a module when it is first imported; compiling all of them takes a minute.
INSTALL := install --no-compile --constraint constraints.txt
PYTEST := $(BIN)/pytest -n 2 --dist worksteal -q
# Changes with every file of the package, also if one is deleted or renamed.
SOURCE := $(shell find src pyproject.toml README.md LICENSE -type f -not -name '*.pyc' \
	| LC_ALL=C sort | xargs cksum | cksum | tr ' ' -)
# Some virtual machines announce matrix tiles and forbid them: products in bfloat16 end the process.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

.PHONY: demo test test-slow lint types unit matrix browser fuzz soak uplot package clean
demo: package
	@$(BIN)/gradsight demo

test: lint types unit demo

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

# Tests import the installed wheel, as users do, and not src.
unit: package $(VENV)/.dev
	$(PYTEST) -m "not slow" --durations=10 --pyargs tests gradsight --ignore=tests/device
	@# In processes of their own: torch cannot unregister a device.
	$(PYTEST) -m "not slow" tests/device

test-slow: package $(VENV)/.dev $(EMPTY)/.package-$(SOURCE) browser
	$(PYTEST) -m slow --durations=10 tests --ignore=tests/device
	$(PYTEST) -m slow tests/device

# Write docs/matrix.md: which instrument works where. `make test-slow` compares it with the behaviour.
matrix: package $(VENV)/.dev
	MATRIX=write $(BIN)/pytest -q tests/matrix

# Give every reader of files a minute of malformed input.
fuzz: package $(VENV)/.dev
	$(BIN)/python fuzz/run.py

# The reliability campaign in short: kills, full disks, ranks, flipped bytes; about 15 minutes.
soak: package $(VENV)/.dev
	$(BIN)/python benchmarks/reliability.py

# Install the system's browser for the tests of the page; BROWSER=0 leaves them out.
browser:
	@scripts/browser.sh

package: $(VENV)/.package-$(SOURCE)

# torch first and alone, so that no other package can bring another build of it.
$(VENV)/.torch: constraints.txt
	@$(STAGE) "creating $(VENV)" $(PYTHON) -m venv $(VENV)
	@$(STAGE) "installing torch" $(PIP) $(INSTALL) torch hatchling
	@touch $@

$(VENV)/.package-$(SOURCE): | $(VENV)/.torch
	@rm -rf $(DIST) $(VENV)/.package-*
	@$(STAGE) "building the package" $(BIN)/hatchling build -d $(DIST)
	@$(PIP) uninstall --quiet --yes gradsight 2>&1 | grep -v "not installed" || true
	@$(STAGE) "installing the package and what the demo imports" \
		$(PIP) $(INSTALL) "$$(echo $(DIST)/*.whl)[hf]"
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | package
	@$(STAGE) "installing the development packages" $(PIP) $(INSTALL) "$$(echo $(DIST)/*.whl)[dev]"
	@touch $@

# An environment with what `pip install gradsight` gives, and nothing else.
$(EMPTY)/.torch: constraints.txt | $(VENV)/.torch
	@$(STAGE) "creating the environment without extras" $(PYTHON) -m venv --without-pip $(EMPTY)
	@$(STAGE) "installing torch there" $(PIP) --python $(EMPTY)/bin/python $(INSTALL) torch
	@touch $@

$(EMPTY)/.package-$(SOURCE): | $(EMPTY)/.torch package
	@rm -f $(EMPTY)/.package-*
	@$(PIP) --python $(EMPTY)/bin/python uninstall --quiet --yes gradsight 2>&1 \
		| grep -v "not installed" || true
	@$(STAGE) "installing the package there" \
		$(PIP) --python $(EMPTY)/bin/python $(INSTALL) $(DIST)/*.whl
	@touch $@

# The newest uPlot, or UPLOT=1.6.32: script, style, licence, checksums. Needs npm; read the diff.
uplot:
	scripts/update_uplot.sh $(UPLOT)

clean:
	rm -rf $(VENV)
