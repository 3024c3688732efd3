"""What layers remember between steps, and what moves at a step: histories, channels, resets, measured conditions."""

import copy
import math
import pickle

import pytest
import torch
from mechanism_recipes import HOT, RECIPES
from tiny_recipes import base
from torch import nn

import nvfp4_train as nt
from nvfp4_train.quantization import quantize

K, N = 64, 48
DELAYED = RECIPES["delayed"]


def model(recipe, seed=0):
    torch.manual_seed(seed)
    m = nn.Sequential(nn.Linear(K, N, bias=False))
    nt.convert(m, recipe)
    return m


def step(m, n, size=1.0, total=100):
    nt.set_progress(m, n, total)
    g = torch.Generator().manual_seed(n)
    x = (torch.randn(16, K, generator=g).clamp(-3, 3) * size).requires_grad_()
    m.zero_grad()
    y = m(x)
    y.backward(torch.randn(16, N, generator=g))
    return y.detach(), x.grad, m[0].weight.grad


def test_delayed_scales_by_the_largest_of_the_steps_before():
    m = model(DELAYED)
    history = m[0]._buffers["quantizer_fprop_input"]
    assert history.shape == (5,)
    seen = []
    for n, size in enumerate((1.0, 4.0, 2.0, 0.5, 0.5, 0.5, 0.5)):
        nt.set_progress(m, n, 100)
        x = torch.full((4, K), size)
        x[0, 0] = size * 1.5
        m(x.requires_grad_()).sum().backward()
        earlier = max(seen[-4:], default=size * 1.5)
        q = quantize(x.detach(), m[0].plan.fprop_input, amax=torch.tensor(earlier))
        w = quantize(m[0].weight.detach(), m[0].plan.fprop_weight)
        with torch.no_grad():
            frozen = copy.deepcopy(m)
            frozen[0]._buffers["quantizer_fprop_input"][0] = 0
            torch.testing.assert_close(frozen(x), q.dequantize() @ w.dequantize().T, rtol=1e-5, atol=1e-4 * size)
        seen.append(size * 1.5)
        assert history[0] == size * 1.5
    assert history.tolist() == [s * 1.5 for s in (0.5, 0.5, 0.5, 0.5, 2.0)]


def test_a_step_collects_its_microbatches_and_evaluation_teaches_nothing():
    m = model(DELAYED)
    history = m[0]._buffers["quantizer_fprop_input"]
    nt.set_progress(m, 0, 100)
    for size in (1.0, 3.0, 2.0):
        m(torch.full((4, K), size).requires_grad_()).sum().backward()
    with torch.no_grad():
        m(torch.full((4, K), 9.0))
    assert history.tolist() == [3.0, 0, 0, 0, 0]
    nt.set_progress(m, 0, 100)  # the same step again, as after a resume
    assert history[0] == 3
    nt.set_progress(m, 1, 100)
    assert history.tolist() == [0, 3.0, 0, 0, 0]


def test_nothing_that_is_no_number_enters_a_history():
    m = model(DELAYED)
    step(m, 0)
    before = m[0]._buffers["quantizer_fprop_input"].clone()
    nt.set_progress(m, 1, 100)
    x = torch.ones(4, K)
    x[2, 3] = math.inf
    assert m(x.requires_grad_())[2].isnan().any()
    assert torch.equal(m[0]._buffers["quantizer_fprop_input"][1:], before[:-1])
    assert m[0]._buffers["quantizer_fprop_input"].isfinite().all()


def test_without_set_progress_a_layer_that_remembers_refuses():
    with pytest.raises(ValueError, match="set_progress"):
        model(DELAYED)(torch.ones(2, K))


def observed(first, last):
    split = HOT | {"observe": [first, last]}
    recipe = RECIPES["tetrajet2"]
    fprop = recipe["fprop"] | {"input": recipe["fprop"]["input"] | {"split": split}}
    wgrad = recipe["wgrad"] | {"input": recipe["wgrad"]["input"] | {"split": split}}
    return recipe | {"fprop": fprop, "wgrad": wgrad}


def test_channels_are_chosen_by_their_norms_in_the_window():
    m = model(observed(1, 2))
    loud = {0: 5, 1: 9, 2: 9, 3: 5, 4: 5}  # which channel is loud in which step
    for n, channel in loud.items():
        nt.set_progress(m, n, 100)
        with nt_recording() as log:
            x = torch.randn(16, K)
            x[:, channel] *= 50
            m(x.requires_grad_()).sum().backward()
        apart = any("e4m3" == row["a"].split(":")[0] for row in log.gemms())
        assert apart == (n > 2)
    assert 9 in m[0]._buffers["quantizer_channels"] and 5 not in m[0]._buffers["quantizer_channels"]
    assert len(m[0]._buffers["quantizer_channels"]) == round(0.1 * K)


def nt_recording():
    from nvfp4_train import ledger

    return ledger.recording()


@pytest.mark.parametrize("recipe", [DELAYED, observed(1, 3)], ids=["delayed", "observed"])
def test_saved_and_restored_it_goes_on_as_before(recipe):
    m = model(recipe)
    assert list(m.state_dict()) == ["0.weight"]
    for n in range(3):
        step(m, n, size=1 + n)
    state = pickle.loads(pickle.dumps(nt.quantizer_state(m)))
    twin = model(recipe, seed=9)
    twin.load_state_dict(m.state_dict())
    nt.load_quantizer_state(twin, state)
    for n in range(3, 6):
        torch.manual_seed(n)
        want = step(m, n, size=3)
        torch.manual_seed(n)
        for a, b in zip(want, step(twin, n, size=3), strict=True):
            assert torch.equal(a, b)
    clone = copy.deepcopy(m)
    assert clone[0]._buffers["quantizer_" + ("channels" if "observe" in str(recipe) else "fprop_input")] is not None
    with pytest.raises(ValueError, match="no converted layer"):
        nt.load_quantizer_state(nn.Sequential(nn.ReLU()), state)
    with pytest.raises(ValueError, match="does not fit"):
        nt.load_quantizer_state(model("nvidia_nvfp4"), state)


def test_most_recipes_remember_nothing_and_the_replaced_layer_gets_no_buffers():
    assert nt.quantizer_state(model("nvidia_nvfp4")) == {}
    linear = nn.Linear(K, N)
    layer = nt.QuantizedLinear.from_linear(linear, DELAYED, "x")
    assert layer._buffers and not linear._buffers and list(layer.state_dict()) == list(linear.state_dict())


# A schedule by step and by measurement


def test_a_phase_may_begin_at_a_step_or_with_a_measurement_and_stays():
    schedule = [
        {"from_step": 30, "fprop": "bf16"}, {"when": "grad_to_noise", "below": 1.732, "dgrad": "bf16", "wgrad": "bf16"},
    ]  # fmt: skip
    m = model(base(schedule=schedule))
    bf16 = lambda: [text == "bf16" for text in m[0].plan]  # noqa: E731
    assert not nt.set_progress(m, 29, 100) and not any(bf16())
    assert nt.set_progress(m, 30, 100) and bf16() == [True] * 2 + [False] * 4
    assert not nt.set_progress(m, 31, 100, measured={"grad_to_noise": 1.74})
    assert nt.set_progress(m, 32, 100, measured={"grad_to_noise": 1.7}) and all(bf16())
    assert not nt.set_progress(m, 33, 100, measured={"grad_to_noise": 5.0}) and all(bf16())
    twin = model(base(schedule=schedule))
    nt.load_quantizer_state(twin, nt.quantizer_state(m))
    nt.set_progress(twin, 34, 100)
    assert twin[0].plan == m[0].plan
    with pytest.raises(ValueError, match="did you mean 'grad_to_noise'"):
        nt.set_progress(m, 34, 100, measured={"grad_to_nose": 1.0})


def test_gradient_over_noise_is_measured_from_two_draws():
    m = model(base())
    x, target = torch.randn(64, K), torch.randn(64, N)

    def compute():
        (m(x) * target).sum().backward()

    m[0].weight.grad = torch.ones(N, K)
    torch.manual_seed(0)
    ratio = nt.grad_to_noise(m, compute)
    assert torch.equal(m[0].weight.grad, torch.ones(N, K))
    exact = target.T @ x
    noises = []
    for _ in range(20):
        m.zero_grad()
        compute()
        noises.append(m[0].weight.grad.clone())
    mean = torch.stack(noises).mean(0)
    noise = torch.stack(noises).sub(mean).square().sum((1, 2)).mean().sqrt() * math.sqrt(20 / 19)
    assert ratio == pytest.approx((exact.norm() / noise).item(), rel=0.1)
    still = model("nvidia_nvfp4_no_sr")
    assert nt.grad_to_noise(still, lambda: (still(x) * target).sum().backward()) == math.inf
    with pytest.raises(ValueError, match="no converted layer got a gradient"):
        nt.grad_to_noise(m, lambda: None)


# OsciReset


def test_weights_that_flip_are_set_to_their_quantized_value():
    settings = {"from": 0.2, "every": 10, "window": 5, "ratio": 8}
    m = model(base(oscillation_reset=settings))
    weight, text = m[0].weight, m[0].plan.fprop_weight
    with torch.no_grad():
        weight.fill_(0.1)
        weight[::16, ::16] = 6.0  # one to a tile: every scale is that of 6
        weight[1, 1], weight[2, 2] = 1.25, 1.0
    q = lambda: quantize(weight.detach(), text).dequantize()  # noqa: E731
    moved = []
    for n in range(45):
        with torch.no_grad():
            weight[1, 1] = 1.251 if n % 2 else 1.249  # between 1 and 1.5: flips at every step
            weight[2, 2] += 0.03  # moves as far as its quantized value does
        before, target = weight.detach().clone(), q()
        count = nt.after_optimizer_step(m, n, 100)
        if count:
            moved.append(n)
            assert count == 1 and weight[1, 1] == target[1, 1] and target[1, 1] != before[1, 1]
            before[1, 1] = weight[1, 1]
        assert torch.equal(weight.detach(), before)
    assert moved == [25, 35]  # windows begin at 20 and 30; that of 40 is still open
    assert nt.quantizer_state(m)["0"]["oscillation"].keys() == {
        "weight",
        "quantized",
        "weight_moves",
        "quantized_moves",
    }


def test_a_loop_that_forgets_to_tell_of_its_steps_is_reminded(recwarn):
    m = model(base(oscillation_reset={"from": 0.5, "every": 4, "window": 2, "ratio": 8}))
    for n in range(5):
        nt.set_progress(m, n, 8)
    assert not recwarn.list
    nt.after_optimizer_step(m, 4, 8)
    nt.set_progress(m, 5, 8)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="after_optimizer_step"):
        nt.set_progress(m, 6, 8)


def test_a_window_survives_a_checkpoint():
    settings = {"every": 10, "window": 6, "ratio": 2}
    runs = []
    for stop in (None, 3):
        m = model(base(oscillation_reset=settings))
        g = torch.Generator().manual_seed(1)
        for n in range(12):
            if n == stop:
                twin = model(base(oscillation_reset=settings), seed=5)
                twin.load_state_dict(m.state_dict())
                nt.load_quantizer_state(twin, nt.quantizer_state(m))
                m = twin
            with torch.no_grad():
                m[0].weight.add_(torch.randn(N, K, generator=g) * 0.004)
            nt.after_optimizer_step(m, n, 12)
        runs.append(m[0].weight.detach())
    assert torch.equal(*runs)
    assert nt.after_optimizer_step(model("nvidia_nvfp4"), 3, 10) == 0
    with pytest.raises(ValueError, match="total_steps"):
        nt.after_optimizer_step(m, 13, 12)
