"""How large is the quantization error of each recipe's operands, and is what claims to be unbiased unbiased?

    python experiments/recipes/error_table.py --out experiments/2026-11-30_recipe_errors

Writes results.json and the tables between the marks of README.md in that folder. No training but for one short BF16 run
that gives a real gradient; a few minutes on one CPU core.

Tensors: Gaussian; heavy-tailed (Student's t, 3 degrees of freedom); outlier channels (Gaussian, every 64th channel from
the sixth on 30 times as large); and input, weight and output gradient of a layer of the quickstart's model. Relative
errors: |Q(t) - t| / |t| in the Frobenius norm, in the space before any Hadamard transform.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import nvfp4_train as nt
from nvfp4_kernels.reference.hadamard import signs, step_signs
from nvfp4_kernels.scheme import PER_STEP
from nvfp4_train.operand import OperandSpec
from nvfp4_train.operand_format import BF16
from nvfp4_train.quantization import quantize
from nvfp4_train.recipe import GEMMS, Recipe, recipe_names

SHAPES = {"input": (256, 256), "weight": (256, 256), "grad_output": (256, 256)}
KINDS = ("gaussian", "heavy", "outlier", "real")
DRAWS = (1, 4, 16, 64, 256)
OPERANDS = ("fprop.input", "fprop.weight", "dgrad.grad_output", "dgrad.weight", "wgrad.grad_output", "wgrad.input")
MARKS = ("<!-- tables -->", "<!-- end of tables -->")


def made_up(kind: str) -> dict[str, Tensor]:
    """float32 input, weight and grad_output; channels are columns."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, shape in SHAPES.items():
        t = torch.randn(shape, generator=generator)
        if kind == "heavy":
            t = t / (torch.randn((3, *shape), generator=generator).square().mean(0)).sqrt()
        if kind == "outlier":
            t[:, 5::64] *= 30.0
        tensors[name] = t
    return tensors


def real() -> dict[str, Tensor]:
    """Input, weight and output gradient of the second block's MLP in the quickstart's model after 60 steps in BF16."""
    from nvfp4_train.experiment.config import load_experiment
    from nvfp4_train.experiment.data import load_corpus
    from nvfp4_train.experiment.model import build_model

    experiment = load_experiment(Path(__file__).parents[1] / "quickstart.yaml")
    with tempfile.TemporaryDirectory() as folder:
        corpus = load_corpus(experiment, Path(folder))
        model = build_model(experiment, 1, corpus.info.vocab_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        layer, found = model.model.layers[1].mlp.down_proj, {}
        layer.register_forward_hook(lambda m, args, y: found.update(input=args[0], y=y))
        for step in range(60):
            tokens = corpus.train_batch(1, step, 0, 8, 1)
            y = model(input_ids=tokens[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(y.flatten(0, 1), tokens[:, 1:].flatten())
            found["y"].retain_grad()
            optimizer.zero_grad()
            loss.backward()
            if step < 59:
                optimizer.step()
        found = {"input": found["input"], "grad_output": found["y"].grad}
        rows = {name: t.detach().reshape(-1, t.shape[-1])[:256].float() for name, t in found.items()}
        return rows | {"weight": layer.weight.detach().float().clone()}


def unrotated(values: Tensor, spec: OperandSpec, seed: Tensor) -> Tensor:
    """float64: values [R, K] of a rotated operand in the space of the tensor that it was made from."""
    if not spec.hadamard:
        return values.double()
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < spec.hadamard:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    mask = spec.scheme.sign_mask
    sign = step_signs(seed, spec.hadamard) if mask == PER_STEP else signs(mask, spec.hadamard)
    back = (matrix / math.sqrt(spec.hadamard)) * sign.double()  # (x s H)^-1 = x H s
    return (values.double().view(len(values), -1, spec.hadamard) @ back).view(len(values), -1)


def quantized(t: Tensor, spec: OperandSpec, seed: Tensor, rotate_back: bool = True) -> Tensor:
    """float64 [R, K]: the values that the operand ``spec`` of t stands for."""
    if spec.format == BF16:
        return t.bfloat16().double()
    part = spec.split
    if part is not None and part.part == "mean":
        mean = t.mean(0, keepdim=True)
        return quantized(t - mean, _alone(spec), seed) + mean.double()
    if part is not None:
        hot = hot_channels(t, spec)
        result = quantized(t.index_fill(1, hot, 0.0), _alone(spec), seed)
        other = OperandSpec(**part.spec.to_dict())
        return result.index_copy(1, hot, quantized(t[:, hot].contiguous(), other, seed))
    values = quantize(t, _alone(spec), seed=seed).dequantize()
    return unrotated(values, spec, seed)[:, : t.shape[1]] if rotate_back else values.double()


def _alone(spec: OperandSpec) -> OperandSpec:
    """Without what acts in a layer. An amax history is taken to have seen just this tensor."""
    keys = {k: v for k, v in spec.to_dict().items() if k not in ("history", "requantize", "mask_clipped", "split")}
    return OperandSpec(**(keys | ({"scale_rule": "amax"} if spec.history else {})))


def hot_channels(t: Tensor, spec: OperandSpec) -> Tensor:
    """int64: the columns of t that ``spec`` sets apart."""
    return t.norm(dim=0).topk(max(1, round(spec.split.fraction * t.shape[1]))).indices.sort().values


def operand(recipe: Recipe, where: str, tensors: dict[str, Tensor], number: int) -> tuple[Tensor, Tensor]:
    """Draw ``number`` of an operand, along its reduction dimension, float64: what it stands for, and what it should."""
    gemm, name = where.split(".")
    spec = getattr(recipe, gemm).operands[name]
    source = tensors[name]
    seed = torch.tensor(1000 + number, dtype=torch.int64)
    transposed = where in ("dgrad.weight", "wgrad.grad_output", "wgrad.input")
    target = (source.T if transposed else source).double()
    if spec.requantize:
        source = quantized(source, recipe.fprop.operands[name], seed).float()
    made = quantized((source.T if transposed else source).contiguous(), spec, seed)
    return made, target


def relative(made: Tensor, target: Tensor) -> float:
    return ((made - target).norm() / target.norm()).item()


def errors(recipe: Recipe, tensors: dict[str, Tensor], draws: int = 4) -> dict[str, float]:
    """The relative error of each operand, root mean square over ``draws`` where it is random."""
    found = {}
    for where in OPERANDS:
        squares = [relative(*operand(recipe, where, tensors, number)) ** 2 for number in range(draws)]
        found[where] = math.sqrt(sum(squares) / draws)
    return found


def bias(recipe: Recipe, where: str, tensors: dict[str, Tensor]) -> dict[int, float]:
    """n -> the relative error of the mean of n draws, for an operand that is random; what stays is bias.

    A requantized operand is held to Fprop's: that one is rounded to nearest.
    """
    total, found = None, {}
    for number in range(max(DRAWS)):
        made, target = operand(recipe, where, tensors, number)
        total = made if total is None else total + made
        if number + 1 in DRAWS:
            found[number + 1] = relative(total / (number + 1), _aim(recipe, where, tensors, target))
    return found


def _aim(recipe: Recipe, where: str, tensors: dict[str, Tensor], target: Tensor) -> Tensor:
    gemm, name = where.split(".")
    if not getattr(recipe, gemm).operands[name].requantize:
        return target
    return quantized(tensors[name], recipe.fprop.operands[name], torch.tensor(0)).T


def random_operands(recipe: Recipe) -> list[str]:
    return [
        f"{gemm}.{name}"
        for gemm in GEMMS
        for name, spec in getattr(recipe, gemm).operands.items()
        if spec.format != BF16 and spec.scheme.stochastic
    ]


def measure(tensors: dict[str, dict[str, Tensor]]) -> dict:
    """{"errors": {recipes: {kind: {operand: error}}}, "bias": {recipes: {operand: {n: error}}}}; recipes whose operands
    are the same (at the start of training) share a row: their names, joined by commas."""
    alike: dict = {}
    for name in recipe_names():
        recipe = nt.load_recipe(name)
        if not recipe.quantizes_nothing:
            alike.setdefault(recipe.plan(), []).append(recipe)
    results: dict = {"errors": {}, "bias": {}}
    for recipes in alike.values():
        row, recipe = ", ".join(recipe.name for recipe in recipes), recipes[0]
        results["errors"][row] = {kind: errors(recipe, tensors[kind]) for kind in KINDS}
        results["bias"][row] = {where: bias(recipe, where, tensors["real"]) for where in random_operands(recipe)}
        print(row, flush=True)
    return results


def tables(results: dict) -> str:
    """Markdown: a table of errors for each kind of tensor, and one of biases."""
    heads = {
        "gaussian": "Gaussian", "heavy": "Heavy-tailed (Student's t, 3 degrees of freedom)",
        "outlier": "Outlier channels (every 64th, from the sixth on, 30 times as large)",
        "real": "A real layer (quickstart's model, second block's down_proj after 60 steps)",
    }  # fmt: skip
    parts = []
    for kind in KINDS:
        parts += [f"### {heads[kind]}", "", "relative error in %", ""]
        parts += ["| recipe | " + " | ".join(OPERANDS) + " |", "|---" * (len(OPERANDS) + 1) + "|"]
        for names, by_kind in results["errors"].items():
            cells = [f"{100 * by_kind[kind][where]:.2f}" for where in OPERANDS]
            parts.append(f"| {_ticked(names)} | " + " | ".join(cells) + " |")
        parts.append("")
    parts += ["### Unbiasedness, on the real layer", ""]
    parts += [
        "relative error in % of the mean of n draws; bias: what is left of the last beyond the first / sqrt(n)",
        "",
    ]
    heads = [*(f"n = {n}" for n in DRAWS), "bias"]
    parts += ["| recipe | operand | " + " | ".join(heads) + " |", "|---" * (len(heads) + 2) + "|"]
    for names, places in results["bias"].items():
        for where, by_n in places.items():
            left = math.sqrt(max(by_n[DRAWS[-1]] ** 2 - by_n[1] ** 2 / DRAWS[-1], 0.0))
            cells = [f"{100 * number:.2f}" for number in (*(by_n[n] for n in DRAWS), left)]
            parts.append(f"| {_ticked(names)} | {where} | " + " | ".join(cells) + " |")
    return "\n".join(parts)


def _ticked(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder of README.md and results.json")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    tensors = {kind: made_up(kind) for kind in KINDS[:-1]} | {"real": real()}
    results = measure(tensors)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    page = out / "README.md"
    text = page.read_text() if page.exists() else "\n".join(MARKS)
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    page.write_text(f"{before}{MARKS[0]}\n\n{tables(results)}\n\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
