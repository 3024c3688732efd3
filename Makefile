# make demo   the main job: a recipe beside its BF16 control, a table and an HTML report
# make test   every test that needs no GPU; make gpu-test the others
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test gpu-test lint package-check clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,wandb]"
	touch $@

# what tests hold the kernels and the translation against; without a network they skip, and say so
.triton-3.6/installed: $(VENV)/installed
	-$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(@D) triton==3.6.0 && touch $@

.te/installed: $(VENV)/installed
	-$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --dest $(@D) transformer-engine==2.20.2 && touch $@

demo: $(VENV)/installed
	$(BIN)/nvfp4-train compare experiments/quickstart.yaml --out runs/quickstart

test: $(VENV)/installed .triton-3.6/installed .te/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile  # a file's fixtures are made once

# the whole GPU suite, on a machine with a CUDA device
gpu-test: $(VENV)/installed
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python -m pytest tests/test_triton_quantize.py tests/test_triton_general.py tests/test_recipes_triton.py \
		tests/test_native.py tests/test_mqa_kernels.py

lint: $(VENV)/installed
	$(BIN)/ruff check .

# sdist -> wheel -> installed elsewhere -> run, beside Hugging Face's package named "kernels"
package-check: $(VENV)/installed
	$(BIN)/python tests/package_check.py

clean:
	rm -rf $(VENV) .triton-3.6 .te build dist *.egg-info
