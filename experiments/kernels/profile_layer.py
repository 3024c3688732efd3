"""Where a layer's time goes on the device: every kernel of one replay of its CUDA graph, BF16 beside the recipe.

    python experiments/kernels/profile_layer.py [--recipe nvidia_nvfp4] [--shapes 16384x4096x4096 ...] [--json FILE]

Each side is replayed for ``--seconds`` before it is profiled, since the clock under a load is not that of an idle
device, and profiled over as many replays. The kernels' sum is below the replay's own time by the gaps between them. The
ratio is printed for several lengths of the interleaved queues: how fast the clock follows the load shows there.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn

from nvfp4_train.benchmark import LINEAR_SHAPES, _linear_step, captured, kernel_times, median_seconds
from nvfp4_train.linear import QuantizedLinear


def repeat(function, count: int) -> None:
    for _ in range(count):
        function()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="nvidia_nvfp4")
    parser.add_argument("--shapes", nargs="*", default=["x".join(map(str, shape)) for shape in LINEAR_SHAPES["cuda"]])
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--queues", type=float, nargs="*", default=[0.02, 0.1, 0.5, 2.0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda")
    rows = []
    for text in options.shapes:
        tokens, n_in, n_out = map(int, text.split("x"))
        x = torch.randn(tokens, n_in, device=device, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(tokens, n_out, device=device, dtype=torch.bfloat16)
        linear = nn.Linear(n_in, n_out, bias=False, device=device, dtype=torch.bfloat16)
        layer = QuantizedLinear.from_linear(linear, options.recipe, "profile")
        replays = {
            "bf16": captured(lambda linear=linear, x=x, dy=dy: _linear_step(linear, x, dy, device), device),
            "quantized": captured(lambda layer=layer, x=x, dy=dy: _linear_step(layer, x, dy, device), device),
        }
        for queue in options.queues:
            seconds = median_seconds(replays, device, max(3, round(0.15 / queue)), queue)
            print(f"{text}: {seconds['quantized'] / seconds['bf16']:.4f} of BF16, queues of {queue} s")
        for name, replay in replays.items():
            count = max(1, round(options.seconds / seconds[name]))
            repeat(replay, 3 * count)
            clock = torch.cuda.clock_rate()  # while the queue runs
            torch.cuda.synchronize()
            times = kernel_times(lambda replay=replay, count=count: repeat(replay, count), device)
            times = {kernel: time * 1e3 / count for kernel, time in times.items() if time}
            print(f"  {name}: replay {seconds[name] * 1e6:.0f} us, kernels {sum(times.values()):.0f} us, {clock} MHz")
            for kernel, time in times.items():
                print(f"    {time:8.1f} us  {kernel[:110]}")
            row = {"shape": text, "side": name, "replay_us": seconds[name] * 1e6, "MHz": clock}
            rows.append(row | {"kernels_us": times})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
