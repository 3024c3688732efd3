"""set_progress and bf16_forward: the recipe's schedule in a training loop of the user's own."""

import copy
import io

import pytest
import torch
from tiny_models import model

import nvfp4_train as nt


def test_set_progress_switches_once_and_back():
    m = model()
    nt.convert(m, "nvidia_nvfp4_late_fprop")
    switched = [step for step in range(101) if nt.set_progress(m, step, 100)]
    assert switched == [82]
    assert {layer.plan.fprop_input for layer in (m.layers[0].up, m.layers[3].down)} == {"bf16"}
    assert m.layers[0].up.plan.wgrad_input != "bf16"
    assert nt.set_progress(m, 0, 100) and m.layers[0].up.plan == m.layers[0].up.recipe.plan()


def test_parts_with_recipes_of_their_own_follow_their_own_schedules():
    m = model()
    nt.convert(m.layers[0], "nvidia_nvfp4")
    nt.convert(m.layers[1], "nvidia_nvfp4_late_both")
    assert nt.set_progress(m, 9, 10)
    assert "bf16" not in m.layers[0].up.plan and set(m.layers[1].up.plan) == {"bf16"}


def test_the_switch_changes_what_is_computed():
    tokens = torch.arange(16).reshape(1, 16)
    plain, m = model(), model()
    nt.convert(m, "nvidia_nvfp4_late_fprop")
    early = m(tokens)
    nt.set_progress(m, 9, 10)
    late = m(tokens)
    exact = plain(tokens)
    # BF16 operands leave 2^-9 a GEMM, 4-bit ones some 2^-4
    assert (late - exact).norm() < 0.1 * (early - exact).norm()


@pytest.mark.parametrize("step, total", [(-1, 10), (11, 10), (0, 0), (1.5, 10), (True, 10), (1, "10")])
def test_steps_that_cannot_be(step, total):
    m = model()
    nt.convert(m, "nvidia_nvfp4")
    with pytest.raises(ValueError, match="step"):
        nt.set_progress(m, step, total)


def test_an_unconverted_model_has_no_schedule():
    with pytest.raises(ValueError, match="convert"):
        nt.set_progress(model(), 0, 10)
    with pytest.raises(ValueError, match="convert"), nt.bf16_forward(model()):
        pass


def test_bf16_forward_lasts_as_long_as_its_block():
    m = model()
    nt.convert(m, "nvidia_nvfp4")
    plan = m.layers[0].up.plan
    tokens = torch.arange(16).reshape(1, 16)
    exact = model()(tokens)
    with pytest.raises(KeyError), nt.bf16_forward(m):
        assert m.layers[0].up.plan == plan._replace(fprop_input="bf16", fprop_weight="bf16")
        inside = m(tokens)
        raise KeyError
    assert m.layers[0].up.plan == plan
    assert (inside - exact).norm() < 0.1 * (m(tokens) - exact).norm()


def test_a_copy_keeps_its_own_schedule():
    m = model()
    nt.convert(m, "nvidia_nvfp4_late_both")
    twin = copy.deepcopy(m)
    nt.set_progress(m, 9, 10)
    assert set(m.layers[0].up.plan) == {"bf16"} and "bf16" not in set(twin.layers[0].up.plan)


def test_copies_and_pickles_of_a_control_serve_the_same_loop():
    m = model()
    keys = list(m.state_dict())
    nt.convert(m, "bf16")
    assert list(m.state_dict()) == keys
    buffer = io.BytesIO()
    torch.save(m, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(m), torch.load(buffer, weights_only=False), torch.nn.Sequential(copy.copy(m))):
        assert nt.set_progress(twin, 5, 10) is False
        with nt.bf16_forward(twin):
            pass
