# The two commands of this project:
#   make quickstart   install, build shards, train, evaluate, ask a question about a test picture
#   make test         install, lint, check types, run the tests
# Both make .venv with the python3 on the path; PYTHON=... names another one.

PYTHON ?= python3
RUN ?= runs/easy_vqa
DATA ?= data/easy_vqa
CONFIG ?= configs/easy_vqa.yaml
# Two processes of one thread train faster than one of two (docs/design_decisions.md); a GPU takes one.
PROCESSES ?= $(shell command -v nvidia-smi > /dev/null && echo 1 || echo 2)
QUESTION ?= what is the color of the shape?
PYTEST_ARGS ?= -n 2 --dist loadfile
LINTED := conceptmoe_vl data_pipelines eval bench tests conceptmoe_vl_runtime.py conceptmoe_vl_launch.py demo.py train.py

BIN := .venv/bin
# DeepSpeed and torch look for ninja on the path; the tests run two processes on two cores.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help install install-dev quickstart data train eval ask test lint types pytest format clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n 1,4p

# --- installation: a stamp per set of packages, renewed when pyproject.toml changes ---
.venv/.python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 10) <= sys.version_info[:2] <= (3, 13) else "error: Python 3.10 to 3.13 is needed, $(PYTHON) is %d.%d; name another one: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.quickstart: pyproject.toml | .venv/.python
	$(BIN)/python -m pip install --quiet --editable '.[quickstart]'
	@touch $@

.venv/.dev: pyproject.toml | .venv/.python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch .venv/.quickstart $@

install: .venv/.quickstart

install-dev: .venv/.dev

# --- the first hour ---
quickstart: data train eval ask

data: $(DATA)/manifest.json

$(DATA)/manifest.json: | .venv/.quickstart
	$(BIN)/python -m data_pipelines build easy_vqa $(DATA)

# The same command again resumes a training that was stopped, and ends at once after a whole one.
train: .venv/.quickstart $(DATA)/manifest.json
	OMP_NUM_THREADS=1 $(BIN)/python -m conceptmoe_vl_launch --standalone --nproc_per_node $(PROCESSES) train.py --config $(CONFIG) run_dir=$(RUN) \
		training.gradient_accumulation_steps=$$((2 / $(PROCESSES)))

eval: train
	$(BIN)/python -m eval --model $(RUN)/model --tasks easy_vqa --data $(DATA)

ask: eval
	@picture=$$($(BIN)/python -c 'import easy_vqa; print(easy_vqa.get_test_image_paths()[0])') && \
	echo "$(QUESTION)  ($$picture)" && \
	$(BIN)/python demo.py --model $(RUN)/model "$$picture" "$(QUESTION)"

# --- checks ---
test: lint types pytest

lint: .venv/.dev
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)

types: lint
	$(BIN)/mypy

pytest: types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

format: .venv/.dev
	$(BIN)/ruff check --fix $(LINTED)
	$(BIN)/ruff format $(LINTED)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
