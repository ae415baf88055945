# Two commands: `make demo` and `make test`. Each sets up everything it needs in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
EMPTY  := $(VENV)/without-extras
DIST   := $(VENV)/dist
STAGE  := scripts/stage.sh
PIP    := $(BIN)/pip --disable-pip-version-check
# Some virtual machines announce matrix tiles and forbid them: products in bfloat16 end the process.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

.PHONY: demo test lint types unit matrix browser fuzz soak uplot package clean
demo: package
	@$(BIN)/gradsight demo

# The demo last: it is the README's other command.
test: lint types unit demo

lint: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.ready
	$(BIN)/mypy

# Tests import the package as users get it: the wheel's copy, not src.
unit: package $(EMPTY)/.ready browser
	@$(STAGE) "installing the wheel into the environment without extras" \
		$(PIP) --python $(EMPTY)/bin/python install --no-deps --force-reinstall $(DIST)/*.whl
	$(BIN)/pytest -n 2 --dist worksteal -q --durations=15 --pyargs tests gradsight --ignore=tests/device
	@# By themselves: torch cannot forget a device that a process has once had.
	$(BIN)/pytest -n 2 --dist worksteal -q tests/device

# Which instrument works where, as the tests see it: writes docs/matrix.md. `make test` compares.
matrix: package
	MATRIX=write $(BIN)/pytest -q tests/matrix

# A minute of garbage for every reader of what a stranger may have sent.
fuzz: package
	$(BIN)/python fuzz/run.py

# The reliability campaign in short: kills, full disks, ranks, flips; about 15 minutes.
soak: package
	$(BIN)/python benchmarks/reliability.py

# The page is tested in the system's own browser; BROWSER=0 leaves that out.
browser:
	@scripts/browser.sh

# Always made anew: make cannot see that a file of src has been deleted.
package: $(VENV)/.ready
	@rm -rf $(DIST)
	@$(STAGE) "building the wheel and the sdist" $(BIN)/hatchling build -d $(DIST)
	@$(STAGE) "installing the wheel" $(PIP) install --no-deps --force-reinstall $(DIST)/*.whl

# torch first and alone, so that no other package can bring another build of it.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(STAGE) "making $(VENV)" $(PYTHON) -m venv $(VENV)
	@$(STAGE) "installing torch" $(PIP) install --constraint constraints.txt torch
	@$(STAGE) "installing the packages to develop with" \
		$(PIP) install --constraint constraints.txt '.[dev]'
	@touch $@

# What `pip install gradsight` gives, and nothing else.
$(EMPTY)/.ready: $(VENV)/.ready
	@$(STAGE) "making the environment without extras" $(PYTHON) -m venv $(EMPTY)
	@$(STAGE) "installing torch there" \
		$(PIP) --python $(EMPTY)/bin/python install --constraint constraints.txt torch
	@$(STAGE) "installing the packages that every user gets" \
		$(PIP) --python $(EMPTY)/bin/python install --constraint constraints.txt .
	@touch $@

# The newest uPlot, or UPLOT=1.6.32: script, style, licence, checksums. Needs npm; look at the difference.
uplot:
	scripts/update_uplot.sh $(UPLOT)

clean:
	rm -rf $(VENV)
