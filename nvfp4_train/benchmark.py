"""How fast: each figure is a ratio, in one run, to what a user would use instead.

``bench linear``    Fprop + Dgrad + Wgrad of one layer against BF16 ``nn.Linear``.
``bench quantize``  bytes read and written by the quantize kernels against the copy rate of the same run.

``bench step`` is in benchmark_step.py.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nvfp4_kernels.reference import quantize as reference
from nvfp4_kernels.scheme import Scheme
from nvfp4_train.backend import choose
from nvfp4_train.benchmark_peers import peers
from nvfp4_train.experiment.errors import ExperimentError
from nvfp4_train.linear import QuantizedLinear, transposes_exactly
from nvfp4_train.quantize_ops import kernels_of
from nvfp4_train.recipe import LinearPlan, load_recipe

LINEAR_SHAPES = {"cuda": [(16384, 4096, 4096), (16384, 4096, 14336), (8192, 8192, 8192)], "cpu": [(1024, 256, 256)]}
QUEUE_SECONDS = 0.02
# A GPU's clock follows the power it draws, with a lag of a tenth of a second. Matrices of few distinct values, as FP4
# operands are, draw less. In training the load never changes, so each side is also timed at the clock it settles at.
SETTLED_SECONDS = 0.5
QUANTIZE_KERNELS = ("quantize_kernel", "amax_kernel", "decode_kernel")
QUANTIZE_SHAPE = {"cuda": (8192, 8192), "cpu": (512, 512)}


def choose_device(name: str) -> torch.device:
    """``auto`` is a GPU if there is one. Raises ExperimentError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ExperimentError(f"device must be cpu, cuda or auto, not {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ExperimentError("device cuda is asked for, and this machine has none: choose --device cpu")
    return torch.device(name)


def parse_shapes(texts: list[str] | None, rank: int) -> list[tuple[int, ...]]:
    """``["1024x256"]`` -> ``[(1024, 256)]``. Raises ExperimentError for another rank or a size below 1."""
    shapes = []
    for text in texts or ():
        parts = text.lower().split("x")
        if len(parts) != rank or not all(part.isdigit() and int(part) for part in parts):
            raise ExperimentError(f"a shape here is {rank} positive numbers with x between them, not {text!r}")
        shapes.append(tuple(int(part) for part in parts))
    return shapes


def machine(device: torch.device) -> dict:
    """What ran: device name and versions, for the record."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {"device": name, "torch": torch.__version__, "backend": str(choose(device))}


def median_seconds(
    functions: dict[str, Callable[[], object]], device: torch.device, repeats: int = 20, queue: float = QUEUE_SECONDS
) -> dict:
    """Median time of each function, their calls interleaved so that a drift of the machine meets all alike.

    On a GPU each sample is a queue of calls of ``queue`` seconds, as in training: the device waits for the host only
    where the host is slower than it. ``captured`` takes the host out altogether.
    """
    calls = {}
    for name, function in functions.items():
        for _ in range(3):
            function()
        calls[name] = 1 if device.type != "cuda" else max(1, round(queue / _seconds(function, device, 1)))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(_seconds(function, device, calls[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def _seconds(function: Callable[[], object], device: torch.device, calls: int) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3 / calls


def captured(function: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """``function`` as the replay of a CUDA graph: its time on the device without the host's; itself on a CPU."""
    if device.type != "cuda":
        return function
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = function()

    def replay():
        graph.replay()
        return kept

    return replay


def kernel_times(function: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Milliseconds on the GPU by kernel name in one call of ``function``, the longest first; empty on a CPU."""
    if device.type != "cuda":
        return {}
    function()
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize(device)
    times = {event.key: event.self_device_time_total / 1e3 for event in profile.key_averages()}
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def quantization_time(times: dict[str, float]) -> float:
    """The part of ``kernel_times`` that quantizes and decodes."""
    return sum(time for name, time in times.items() if name.startswith(QUANTIZE_KERNELS))


def bench_linear(
    recipe: str,
    target: torch.device,
    shapes: list[tuple[int, int, int]],
    weights: str = "bfloat16",
    plain: bool = True,
    repeats: int = 20,
) -> list[dict]:
    """One row a shape (tokens, in, out): milliseconds and ratio to BF16 ``nn.Linear``, beside the recipe written in
    plain PyTorch, eager and compiled (``plain``). No shapes: the standard ones of the device. On a GPU also both sides
    as CUDA graphs (``graph``), and so at the clock that each settles at under its own load (``settled``).

    Raises ExperimentError for ``weights`` other than bfloat16 or float32.
    """
    if weights not in ("bfloat16", "float32"):
        raise ExperimentError(f"weights must be bfloat16 or float32, not {weights!r}")
    weight_dtype = getattr(torch, weights)
    rows = []
    for tokens, n_in, n_out in shapes or LINEAR_SHAPES[target.type]:
        x = torch.randn(tokens, n_in, device=target, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(tokens, n_out, device=target, dtype=torch.bfloat16)
        linear = nn.Linear(n_in, n_out, bias=False, device=target, dtype=weight_dtype)
        layer = QuantizedLinear.from_linear(linear, recipe, "bench")
        weight16, faults = linear.weight.detach().bfloat16(), {}
        functions = {
            "bf16": lambda linear=linear, x=x, dy=dy: _linear_step(linear, x, dy, target),
            "quantized": lambda layer=layer, x=x, dy=dy: _linear_step(layer, x, dy, target),
        }
        if target.type == "cuda":
            for name in ("bf16", "quantized"):
                functions[f"{name}_graph"] = captured(functions[name], target)
        if plain:
            step = PlainRecipe(layer.plan)
            seed = torch.tensor(1, device=target)
            arguments = (x.detach(), weight16, dy, seed)
            rivals = {"plain_eager": step} | ({"plain_compiled": torch.compile(step)} if target.type == "cuda" else {})
            for name, rival in rivals.items():
                call = lambda rival=rival, arguments=arguments: rival(*arguments)  # noqa: E731
                if (fault := why_not(call)) is None:
                    functions[name] = call
                else:
                    faults[f"{name}_failed"] = fault
        seconds = median_seconds(functions, target, repeats)
        if target.type == "cuda":
            sides = {f"{name}_settled": functions[f"{name}_graph"] for name in ("bf16", "quantized")}
            seconds |= median_seconds(sides, target, max(3, repeats // 5), SETTLED_SECONDS)
        row = {"tokens": tokens, "in": n_in, "out": n_out, "weights": weights}
        row |= {f"{name}_ms": value * 1e3 for name, value in seconds.items()}
        row |= {
            f"{name}_ratio": value / seconds[name.replace("quantized", "bf16") if "quantized" in name else "bf16"]
            for name, value in seconds.items()
            if not name.startswith("bf16")
        }
        if target.type == "cuda":
            times = kernel_times(functions["quantized_graph"], target)
            row["quantization_share"] = quantization_time(times) / sum(times.values())
        else:  # both sides multiply the same matrices, so what the quantized side takes more is quantization
            row["quantization_share"] = max(0.0, 1 - seconds["bf16"] / seconds["quantized"])
        rows.append(row | faults)
    return rows


def why_not(rival: Callable[[], object]) -> str | None:
    """The first line of what a rival fails with here, or None: what others cannot do must not hide our own figures."""
    try:
        rival()
    except Exception as error:  # compilers fail in as many ways as they have parts
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return None


def _linear_step(layer: nn.Linear, x: Tensor, dy: Tensor, device: torch.device) -> None:
    x.grad = layer.weight.grad = None
    with torch.autocast(device.type, torch.bfloat16, enabled=layer.weight.dtype != x.dtype):
        y = layer(x)
    y.backward(dy)


class PlainRecipe:
    """The same three GEMMs in plain PyTorch, from the reference kernels: what the Triton kernels are held against."""

    def __init__(self, plan: LinearPlan):
        self.schemes = [Scheme.parse(text) for text in plan]
        self.shared_weight = transposes_exactly(plan)

    def __call__(self, x: Tensor, weight: Tensor, dy: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_rows, w_rows, dy_rows, w_columns, dy_columns, x_columns = self.schemes
        x_q, xt_q, x_amax = _plain_pair(x, x_rows, x_columns, seed)
        w_q, wt_q, w_amax = _plain_pair(weight, w_rows, None if self.shared_weight else w_columns, seed)
        dy_q, dyt_q, dy_amax = _plain_pair(dy, dy_rows, dy_columns, seed)
        wt_q, wt_amax = (w_q.T, w_amax[0]) if self.shared_weight else (wt_q, w_amax[1])
        return (
            _plain_product(x_q, w_q, x_amax[0], w_amax[0]),
            _plain_product(dy_q, wt_q, dy_amax[0], wt_amax),
            _plain_product(dyt_q, xt_q, dy_amax[1], x_amax[1]),
        )


def _plain_pair(x, rows, columns, seed):
    amax = reference.global_amax(x, rows, columns)
    pair = reference.quantize(
        x, rows, columns, amax_rows=amax[0], amax_columns=amax[1], seed=seed, row_stream=0, column_stream=0,
        rows_form="decoded", columns_form="decoded",
    )  # fmt: skip
    return (*(None if form is None else form.operand for form in pair), amax)


def _plain_product(a, b, amax_a, amax_b):
    alpha = 1.0 if amax_a is None else amax_a * amax_b * (1.0 / (36.0 * 448.0 * 448.0))
    if a.device.type == "cpu":
        return (a.float() @ b.float().T * alpha).to(torch.bfloat16)
    return (torch.mm(a, b.T, out_dtype=torch.float32) * alpha).to(torch.bfloat16)


def bench_quantize(target: torch.device, shape: tuple[int, int] | None = None, repeats: int = 20) -> list[dict]:
    """One row a kernel: bytes really read and written, GB/s, and the share of a device copy's rate in the same run.

    Quantizers of other libraries, eager and compiled, follow where they are installed (``peers``); what cannot
    run here says why.
    """
    rows, columns = shape or QUANTIZE_SHAPE[target.type]
    x = torch.randn(rows, columns, device=target, dtype=torch.bfloat16)
    seed = torch.tensor(7, device=target)
    other = torch.empty_like(x)
    kernels = kernels_of(choose(target).quantize)
    plan = load_recipe("nvidia_nvfp4").plan(0.0)
    row16, tile, sr, sr_rht, rht = (
        Scheme.parse(text)
        for text in (plan.fprop_input, plan.fprop_weight, plan.dgrad_grad_output, plan.wgrad_grad_output,
                     plan.wgrad_input)
    )  # fmt: skip

    def kernel(row_scheme, column_scheme, row_form="decoded", column_form="decoded"):
        amax = kernels.global_amax(x, row_scheme, column_scheme)
        return lambda: kernels.quantize(
            x, row_scheme, column_scheme, amax_rows=amax[0], amax_columns=amax[1], seed=seed, row_stream=0,
            column_stream=0, rows_form=row_form, columns_form=column_form,
        )  # fmt: skip

    cases = {
        "copy": lambda: other.copy_(x),
        "amax": lambda: kernels.global_amax(x, row16, None),
        "amax, before and after Hadamard": lambda: kernels.global_amax(x, row16, rht),
        "1x16 nearest, decoded": kernel(row16, None),
        "1x16 nearest, packed": kernel(row16, None, "packed"),
        "16x16 nearest, decoded": kernel(tile, None),
        "16x16 nearest, packed + decoded": kernel(tile, None, "both"),
        "1x16 SR, decoded": kernel(sr, None),
        "x: row decoded + column packed, Hadamard": kernel(row16, rht, "decoded", "packed"),
        "dy: row + column, Hadamard + SR, decoded": kernel(sr, sr_rht),
    }
    moved = {name: x.nbytes + _output_bytes(function()) for name, function in cases.items()}
    cases = {name: captured(function, target) for name, function in cases.items()}
    rivals = {}
    for name, function in peers(x).items():
        rivals[f"{name}, packed"] = function
        if target.type == "cuda":
            rivals[f"{name} compiled, packed"] = torch.compile(function, dynamic=False)
    faults = {name: fault for name, function in rivals.items() if (fault := why_not(function)) is not None}
    for name, function in rivals.items():
        if name not in faults:
            moved[name], cases[name] = x.nbytes + _output_bytes(function()), function
    seconds = median_seconds(cases, target, repeats)
    copy_rate = moved["copy"] / seconds["copy"]
    return [
        {
            "kernel": name,
            "us": seconds[name] * 1e6,
            "GB/s": moved[name] / seconds[name] / 1e9,
            "of_copy_rate": moved[name] / seconds[name] / copy_rate,
        }
        for name in cases
    ] + [{"kernel": name, "failed": fault} for name, fault in faults.items()]


def _output_bytes(result: object) -> int:
    if isinstance(result, Tensor):
        return result.nbytes
    if not isinstance(result, tuple):  # a peer's own class
        result = tuple(vars(result).values()) if hasattr(result, "__dict__") else ()
    return sum(_output_bytes(item) for item in result)
