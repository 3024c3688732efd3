"""The command line: parses, calls, prints.

Exit codes: 0 done; 1 a job crashed, or a bug; 2 the user can put it right (one sentence says how); 3 numbers of an arm
became non-finite; 130 stopped by the user.
"""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(
    help="Train language models in 4 bits, beside their BF16 control.", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip

ExperimentFile = Annotated[Path, typer.Argument(metavar="EXPERIMENT", help="the experiment's YAML file")]
Out = Annotated[
    Path | None, typer.Option("--out", help="the run folder, by default runs/NAME; a stopped run goes on there")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON to stdout, everything else to stderr")]


def _told_plainly(command: Callable[..., None]) -> Callable[..., None]:
    """A fault of the user's becomes one sentence and exit code 2, never a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        # Read by torch when it is imported; the command line itself computes next to nothing.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        from nvfp4_train.experiment.errors import ExperimentError, TrainingStopped
        from nvfp4_train.recipe_errors import RecipeError
        from nvfp4_train.survey import ConversionError

        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            _fail("stopped; the same command goes on from the last checkpoint", 130, kwargs["as_json"])
        except TrainingStopped as stopped:
            _fail(str(stopped), 3, kwargs["as_json"])
        except (ExperimentError, RecipeError, ConversionError) as error:
            _fail(str(error), 2, kwargs["as_json"])

    return run


def _fail(message: str, code: int, as_json: bool) -> None:
    typer.echo(f"error: {message}", err=True)
    if as_json:
        typer.echo(json.dumps({"error": message}))
    raise typer.Exit(code)


def _console(as_json: bool) -> Console:
    return Console(stderr=as_json, highlight=False)


@app.command()
@_told_plainly
def compare(experiment: ExperimentFile, out: Out = None, as_json: Json = False) -> None:
    """Train every arm with every seed, then say how large the gap to BF16 is. Runs only what is missing in OUT."""
    from nvfp4_train.experiment.compare import compare as run
    from nvfp4_train.experiment.config import load_experiment

    console = _console(as_json)
    loaded = load_experiment(experiment)
    out = out or _default_out(loaded.name)
    jobs = run(loaded, out, console)
    _show_report(out, console, as_json)
    if failed := [job for job in jobs if job.status == "failed"]:
        for job in failed:
            typer.echo(f"error: {job.arm} seed {job.seed}: {job.message}", err=True)
        raise typer.Exit(max(job.exit_code for job in failed))


@app.command()
@_told_plainly
def train(
    experiment: ExperimentFile,
    arm: Annotated[str, typer.Option(help="the arm's name in the experiment (or noise_floor)")],
    seed: Annotated[int, typer.Option(help="one of the experiment's seeds")],
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Train one arm with one seed; killed at any moment, the same command goes on."""
    from nvfp4_train.experiment.config import load_experiment
    from nvfp4_train.experiment.train import run_job

    loaded = load_experiment(experiment)
    result = run_job(loaded, arm, seed, out or _default_out(loaded.name), lambda line: typer.echo(line, err=True))
    if os.environ.get("RANK", "0") != "0":
        return  # torchrun started several of this: the first speaks
    text = f"{arm} seed {seed}: {result['steps']} steps, held-out loss {result['final_loss']:.4f}"
    typer.echo(json.dumps(result) if as_json else text)


@app.command()
@_told_plainly
def report(out: Annotated[Path, typer.Argument(metavar="OUT", help="a run folder")], as_json: Json = False) -> None:
    """Render the report of a run folder again; works while it runs, too."""
    _show_report(out, _console(as_json), as_json)


@app.command()
@_told_plainly
def recipes(as_json: Json = False) -> None:
    """List the recipes: formats and bits per value of each GEMM, what runs in 4 bits, what each needs, its source."""
    from nvfp4_train.experiment.listing import recipe_lines, recipe_rows

    rows = recipe_rows()
    typer.echo(json.dumps(rows, indent=1) if as_json else "\n".join(recipe_lines(rows)))


@app.command("explain")
@_told_plainly
def explain_recipe(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="a recipe's name or file")],
    model: Annotated[
        Path | None, typer.Option(help="an experiment file, a transformers config.json, or a folder with one")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="length of the sequence that costs are counted for")] = None,
    as_json: Json = False,
) -> None:
    """What a recipe does, where it saves on a model, where it may fail and how to find out."""
    from nvfp4_train.experiment.listing import explanation
    from nvfp4_train.explaining.summary import explanation_lines

    told = explanation(recipe, model, tokens)
    typer.echo(json.dumps(told, indent=1) if as_json else "\n".join(explanation_lines(told)))


@app.command()
@_told_plainly
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="a step_... folder or job folder of a run")],
    format_: Annotated[str, typer.Option("--format", help="modelopt or compressed-tensors")] = "modelopt",
    out: Annotated[Path | None, typer.Option("--out", help="a new folder, by default in the job's folder")] = None,
    recipe: Annotated[str | None, typer.Option(help="for a folder that does not say what trained it")] = None,
    shared_scales: Annotated[bool, typer.Option(help="one global scale for q, k, v and for gate, up")] = False,
    calibrate: Annotated[int, typer.Option(min=0, help="held-out sequences to measure input scales on (W4A4)")] = 0,
    as_json: Json = False,
) -> None:
    """Write a Hugging Face folder of 4-bit weights, those that Fprop used, for serving engines."""
    from nvfp4_train.experiment.exports import export_checkpoint

    done = export_checkpoint(
        checkpoint, format_, out, recipe=recipe, shared_scales=shared_scales, calibration=calibrate
    )
    typer.echo(json.dumps(done.to_dict(), indent=1) if as_json else str(done))


@app.command()
@_told_plainly
def audit(
    subject: Annotated[
        str | None, typer.Argument(metavar="RECIPE_OR_EXPERIMENT", help="a recipe (name, file) or an experiment file")
    ] = None,
    require: Annotated[str | None, typer.Option(help="share of matmul FLOPs that must run quantized: 80%")] = None,
    arm: Annotated[str | None, typer.Option(help="of an experiment; by default every arm that quantizes")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="a run folder: its weights; kept for its report")] = None,
    sensitivity: Annotated[bool, typer.Option("--sensitivity", help="rank the layers, suggest keep_bf16")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="which instructions the kernels compile to")] = False,
    target: Annotated[str | None, typer.Option(help="with --kernels: sm_100, sm_103, sm_120 or sm_121")] = None,
    triton: Annotated[Path | None, typer.Option(help="with --kernels: the folder of another Triton")] = None,
    device: Annotated[bool, typer.Option("--device", help="native against emulated on this machine's GPU")] = False,
    as_json: Json = False,
) -> None:
    """Prove from what is executed that a recipe does what it says; exit 1 with the list of what was not proven."""
    from nvfp4_train.experiment.errors import ExperimentError

    if sum((subject is not None, kernels, device)) != 1:
        raise ExperimentError("give one of: a recipe (such as nvidia_nvfp4) or experiment file, --kernels, --device")
    if kernels:
        from nvfp4_train.kernel_audit import kernel_lines, kernel_report

        report = _valid(kernel_report, target, triton)
        lines, proven = kernel_lines(report), not report["faults"]
    elif device:
        from nvfp4_train.device_check import device_lines, device_report

        report = _valid(device_report)
        lines, proven = device_lines(report), not report["faults"]
    else:
        from nvfp4_train.experiment.auditing import audit_lines, audit_subject, require_share

        audits = audit_subject(subject, require=require_share(require), arm=arm, out=out, sensitivity=sensitivity)
        proven = all(found.ok for found in audits.values())
        report = {"ok": proven, "audits": {name: found.to_dict() for name, found in audits.items()}}
        lines = audit_lines(audits)
    typer.echo(json.dumps(report, indent=1) if as_json else "\n".join(lines))
    raise typer.Exit(0 if proven else 1)


def _valid(report: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """A ValueError of a report is the user's to put right."""
    from nvfp4_train.experiment.errors import ExperimentError

    try:
        return report(*arguments)
    except ValueError as error:
        raise ExperimentError(str(error)) from None


bench_app = typer.Typer(help="Measure speed: ratios in one run, medians.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench_app, name="bench")
RecipeName = Annotated[str, typer.Option("--recipe", help="a recipe's name or file")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto")]


@bench_app.command("linear")
@_told_plainly
def bench_linear(
    recipe: RecipeName = "nvidia_nvfp4",
    device: Device = "auto",
    shape: Annotated[list[str] | None, typer.Option(help="TOKENSxINxOUT, may be repeated")] = None,
    weights: Annotated[str, typer.Option(help="bfloat16 or float32")] = "bfloat16",
    plain: Annotated[bool, typer.Option(help="also the recipe in plain PyTorch, eager and compiled")] = True,
    as_json: Json = False,
) -> None:
    """Fprop + Dgrad + Wgrad of one layer against BF16 nn.Linear."""
    from nvfp4_train import benchmark

    target = benchmark.choose_device(device)
    rows = benchmark.bench_linear(recipe, target, benchmark.parse_shapes(shape, 3), weights, plain)
    _show_rows(rows, benchmark.machine(target), as_json)


@bench_app.command("quantize")
@_told_plainly
def bench_quantize(
    device: Device = "auto",
    shape: Annotated[str | None, typer.Option(help="ROWSxCOLUMNS")] = None,
    as_json: Json = False,
) -> None:
    """Bytes read and written by the quantize kernels over the copy rate of the same run."""
    from nvfp4_train import benchmark

    target = benchmark.choose_device(device)
    shapes = benchmark.parse_shapes([shape] if shape else None, 2)
    _show_rows(benchmark.bench_quantize(target, shapes[0] if shapes else None), benchmark.machine(target), as_json)


@bench_app.command("step")
@_told_plainly
def bench_step(
    experiment: ExperimentFile,
    recipe: RecipeName = "nvidia_nvfp4",
    device: Device = "auto",
    compiled: Annotated[bool, typer.Option(help="torch.compile on both sides")] = False,
    graphs: Annotated[bool, typer.Option(help="CUDA graphs on both sides")] = False,
    threads: Annotated[int, typer.Option(help="CPU threads")] = 1,
    as_json: Json = False,
) -> None:
    """A training step of the experiment's model, recipe against BF16."""
    from nvfp4_train import benchmark
    from nvfp4_train.benchmark_step import bench_step as measure
    from nvfp4_train.experiment.config import load_experiment

    target = benchmark.choose_device(device)
    row = measure(
        load_experiment(experiment), recipe, target, compiled=compiled, graphs=graphs, threads=threads
    )
    _show_rows([row], benchmark.machine(target), as_json)


@bench_app.command("mqa_logits")
@_told_plainly
def bench_mqa_logits(
    device: Device = "auto",
    shape: Annotated[list[str] | None, typer.Option(help="QUERIESxKEYS, may be repeated")] = None,
    decoding: Annotated[bool, typer.Option(help="sequences with keys of their own")] = True,
    as_json: Json = False,
) -> None:
    """FP4 MQA logits, packed operands to scores, against the same in (compiled) PyTorch."""
    from nvfp4_train import benchmark
    from nvfp4_train.mqa_benchmark import bench_mqa_logits as measure

    target = benchmark.choose_device(device)
    _show_rows(
        measure(target, benchmark.parse_shapes(shape, 2), decoding), benchmark.machine(target), as_json
    )


def _default_out(name: str) -> Path:
    return Path("runs") / name


def _show_rows(rows: list[dict[str, Any]], machine: dict[str, str], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"machine": machine, "rows": rows}, indent=1))
        return
    from rich.table import Table

    table = Table(caption=", ".join(f"{key} {value}" for key, value in machine.items()))
    keys = list(dict.fromkeys(key for row in rows for key in row))  # what failed has other figures than the rest
    found = [[row.get(key, "-") for key in keys] for row in rows]
    cells = [[f"{value:.3f}" if isinstance(value, float) else str(value) for value in line] for line in found]
    if len(rows[0]) > 5:  # many figures of few cases: one line a figure
        table.show_header = False
        for line in zip(keys, *cells, strict=True):
            table.add_row(*line)
    else:
        for key in keys:
            table.add_column(key, justify="left" if key == "kernel" else "right")
        for line in cells:
            table.add_row(*line)
    _console(False).print(table)


def _show_report(out: Path, console: Console, as_json: bool) -> None:
    from nvfp4_train.experiment.errors import ExperimentError, disk_faults
    from nvfp4_train.experiment.report import render, summary, summary_table

    try:
        numbers = summary(out)
    except ValueError as error:
        raise ExperimentError(str(error)) from None
    with disk_faults(out):
        page = render(out)
    if as_json:
        typer.echo(json.dumps({**numbers, "report": str(page)}, indent=1))
        return
    console.print(summary_table(numbers))
    console.print(numbers["verdict"], markup=False)
    console.print(f"report: {page}", markup=False, soft_wrap=True)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
