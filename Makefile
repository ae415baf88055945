# Two commands: `make demo` and `make test`. Each sets up everything it needs in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
EMPTY  := $(VENV)/without-extras
DIST   := $(VENV)/dist
STAGE  := scripts/stage.sh
PIP    := $(BIN)/pip --disable-pip-version-check

.PHONY: demo test lint types unit package clean
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
unit: package $(EMPTY)/.ready
	@$(STAGE) "installing the wheel into the environment without extras" \
		$(PIP) --python $(EMPTY)/bin/python install --no-deps --force-reinstall $(DIST)/*.whl
	$(BIN)/pytest -n 2 --dist worksteal -q --durations=15 --pyargs tests gradsight

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

clean:
	rm -rf $(VENV)
