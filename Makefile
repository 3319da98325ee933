# make run    set everything up and compare several ways of training on one imperfect cluster
# make test   set everything up, check the house rules and run the tests: a few minutes
# make test-all  the same with every case of every test
# make check  the house rules only: ruff, pyright, import-linter, sizes
# make slow   the long tests: thousands of random-fault seeds
# make hosts  the tests on several hosts: network namespaces, as root
# make browser  the tests of the page in a real Chromium, installed from Debian if it is not there
# make bench  speed as ratios within one run: the simulator, then real workers (an hour)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Python keeps what it has compiled, also where the environment says otherwise: else every process of
# every test compiles the package again. Each of the two processes begins with one half of the tests,
# so that those of a file share what it has set up, and takes from the other when it has none left.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest
ON_TWO_CORES := -n 2 --dist worksteal

.PHONY: run test test-all check slow hosts browser bench clean

run: $(READY)
	$(BIN)/gossamer compare
	@echo
	@echo "The command is $(BIN)/gossamer. To type just gossamer: source $(BIN)/activate"

test: check
	$(PYTEST) $(ON_TWO_CORES)

test-all: check
	$(PYTEST) $(ON_TWO_CORES) --hypothesis-profile others -m 'not slow and not hosts'

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python tools/size_gate.py

slow: $(READY)
	$(PYTEST) $(ON_TWO_CORES) --hypothesis-profile others -m slow --timeout 3000

hosts: $(READY)
	$(PYTEST) -m hosts tests/netns

browser: $(READY)
	command -v chromium > /dev/null || apt-get install --yes --no-install-recommends chromium
	$(PYTEST) -m browser tests/report

bench: $(READY)
	$(BIN)/python benchmarks/simulator.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/real.py

# Once, and again only when what is to be installed has changed.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch numpy
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build *.egg-info src/*.egg-info
