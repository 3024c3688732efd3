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
Out = Annotated[Path, typer.Option("--out", help="the run folder; a run that was stopped goes on there")]
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
def compare(experiment: ExperimentFile, out: Out, as_json: Json = False) -> None:
    """Train every arm with every seed, then say how large the gap to BF16 is. Runs only what is missing in OUT."""
    from nvfp4_train.experiment.compare import compare as run
    from nvfp4_train.experiment.config import load_experiment

    console = _console(as_json)
    jobs = run(load_experiment(experiment), out, console)
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
    out: Out,
    as_json: Json = False,
) -> None:
    """Train one arm with one seed; killed at any moment, the same command goes on."""
    from nvfp4_train.experiment.config import load_experiment
    from nvfp4_train.experiment.train import run_job

    result = run_job(load_experiment(experiment), arm, seed, out, lambda line: typer.echo(line, err=True))
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
    """List the recipes with the format and the bits per value of each GEMM."""
    from nvfp4_train.experiment.listing import recipe_lines, recipe_rows

    rows = recipe_rows()
    typer.echo(json.dumps(rows, indent=1) if as_json else "\n".join(recipe_lines(rows)))


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
