"""One arm with one seed, from the first step to the last: a job that can be killed at any moment and goes on exactly.

What one step does, in this order, is `Job._step`; what a checkpoint must hold so that the steps after it come out
bitwise the same is `Job._state`. Arms of one seed share initial weights and batches; only the recipe differs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4_train import conversion
from nvfp4_train.experiment import checkpoint, randomness
from nvfp4_train.experiment.config import Experiment
from nvfp4_train.experiment.data import Corpus
from nvfp4_train.experiment.diagnosis import first_bad_gradient, first_bad_output, first_bad_weight
from nvfp4_train.experiment.errors import ExperimentError, Failure, TrainingStopped
from nvfp4_train.experiment.model import build_model, learning_rate
from nvfp4_train.experiment.record import choose_device, job_folder, prepare_run
from nvfp4_train.experiment.tracking import MetricsLog, WandbRun, check_wandb

SPIKE_WINDOW = 64
SPIKE_SIGMAS = 6.0
SPIKE_NATS = 0.1


def run_job(
    experiment: Experiment, arm: str, seed: int, out: Path, announce: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Trains what is left of one job and returns its result.json; raises TrainingStopped where the numbers break."""
    experiment.arm(arm)
    if seed not in experiment.seeds:
        raise ExperimentError(f"{experiment.path} has no seed {seed}; its seeds are {experiment.seeds}")
    check_wandb(experiment)
    corpus = prepare_run(experiment, out)
    folder = job_folder(out, arm, seed)
    with _only_one(folder):
        if (done := read_result(folder)) is not None:
            if done["failure"]:
                raise TrainingStopped(arm, seed, failure_of(done, out))
            return done
        return Job(experiment, arm, seed, folder, corpus, announce).run()


def read_result(folder: Path) -> dict[str, Any] | None:
    path = folder / "result.json"
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text())
        _ = result["status"], result["failure"]
    except (ValueError, KeyError, TypeError) as error:
        raise ExperimentError(f"{path} is damaged ({error}); delete it and run the same command again") from None
    return result


def failure_of(result: dict[str, Any], out: Path) -> Failure:
    """The failure of a result.json, its checkpoint as a path that can be opened from here."""
    failure = Failure(**result["failure"])
    return failure._replace(checkpoint=failure.checkpoint and str(out / failure.checkpoint))


@contextlib.contextmanager
def _only_one(folder: Path):
    """Two processes in one folder would mix their metrics; the kernel drops this lock when a process dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExperimentError(f"another process is training in {folder}; wait for it or stop it") from None
        yield


def next_token_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross entropy in nats, float32; `windows` int64 [batch, sequence_length + 1]."""
    with torch.autocast(windows.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


class Job:
    """The state of one arm x seed while it trains."""

    def __init__(
        self, experiment: Experiment, arm: str, seed: int, folder: Path, corpus: Corpus,
        announce: Callable[[str], None] = lambda line: None,
    ):  # fmt: skip
        self.experiment, self.arm, self.seed = experiment, experiment.arm(arm), seed
        self.folder, self.corpus, self.announce = folder, corpus, announce
        self.settings = settings = experiment.training
        torch.set_num_threads(settings.threads)
        self.device = choose_device(settings.device)
        self.total = experiment.total_steps
        self.quantized = not self.arm.recipe.quantizes_nothing

        vocab = corpus.info.vocab_size
        self.model = build_model(experiment, seed, vocab, nudged=self.arm.role == "noise_floor").to(self.device)
        if self.quantized:
            conversion.convert(self.model, self.arm.recipe)
        if settings.compile:
            randomness.refuse_compiled_dropout(self.model)
            self.model.compile()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        matrices, others = [p for p in self.parameters if p.ndim > 1], [p for p in self.parameters if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=settings.learning_rate, betas=settings.betas, fused=True,
        )  # fmt: skip
        self.held_out = corpus.held_out_batches(settings.batch_size, experiment.evaluation.batches)

        self.step = 0  # steps done
        self.seconds = 0.0  # spent training, over all the processes that worked on this job
        self.evaluation: dict[str, float | None] = {}  # the latest
        self.recent: deque[float] = deque(maxlen=SPIKE_WINDOW)
        torch.manual_seed(randomness.derive_seed("quantizer", self.arm.name, seed))
        self.dropout = randomness.DropoutStream(self.device, seed)
        self.identity = {
            "experiment": experiment.name, "settings": experiment.digest(), "arm": arm, "seed": seed,
            "recipe": self.arm.recipe.to_yaml(), "model": type(self.model).__name__,
        }  # fmt: skip
        self.last_checkpoint = checkpoint.latest(folder / "checkpoint")
        offset = self._resume() if self.last_checkpoint else 0
        self.metrics = MetricsLog(folder / "metrics.jsonl", offset)
        self.wandb = WandbRun(experiment, arm, seed, folder)

    def run(self) -> dict[str, Any]:
        try:
            with self.dropout:
                while self.step < self.total:
                    self._announce_phase()
                    self._step()
                    if self.step % self.experiment.evaluation.every == 0 or self.step == self.total:
                        self._evaluate()
                    if self.step % self.experiment.checkpoint.every == 0 or self.step == self.total:
                        self._save()
        except TrainingStopped as stopped:
            self._finish("failed", stopped.failure)
            raise
        return self._finish("finished", None)

    def _step(self) -> None:
        """One optimizer step: schedule, learning rate, microbatches, clipping, update."""
        begin, step, parts = time.perf_counter(), self.step, self.settings.accumulation
        if self.quantized:
            conversion.set_progress(self.model, step, self.total)
        rate = learning_rate(self.experiment, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        losses = []
        for part in range(parts):
            windows = self._batch(part)
            loss = next_token_loss(self.model, windows)
            (loss / parts).backward()
            losses.append(loss.detach())
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        loss_value, norm_value = torch.stack([torch.stack(losses).mean(), norm.float()]).tolist()
        if not math.isfinite(loss_value):
            raise TrainingStopped(self.arm.name, self.seed, self._failure(self._diagnose()))
        if not math.isfinite(norm_value):
            raise TrainingStopped(self.arm.name, self.seed, self._failure(first_bad_gradient(self.model)))
        if self.settings.clip is not None:  # after the checks: clipping by a NaN would make every gradient NaN
            nn.utils.clip_grads_with_norm_(self.parameters, self.settings.clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        elapsed = time.perf_counter() - begin
        self.seconds += elapsed
        self._write(
            kind="train", loss=loss_value, lr=rate, grad_norm=norm_value,
            tokens_per_s=self.experiment.tokens_per_step / elapsed,
        )  # fmt: skip
        self._watch_for_spike(loss_value)

    def _batch(self, part: int) -> Tensor:
        size, parts = self.settings.batch_size, self.settings.accumulation
        windows = self.corpus.train_batch(self.seed, self.step, part, size, parts)
        if self.device.type == "cuda":
            return windows.pin_memory().to(self.device, non_blocking=True)
        return windows

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Held-out loss as the recipe computes it and with a BF16 forward of the same weights."""
        self.model.eval()
        with randomness.isolated(self.device, "evaluation", self.seed):
            loss = self._held_out_loss()
            bf16 = None
            if self.quantized:
                with conversion.bf16_forward(self.model):
                    bf16 = self._held_out_loss()
        if not math.isfinite(loss):
            told = first_bad_weight(self.model) or "the held-out loss is not finite"
            raise TrainingStopped(self.arm.name, self.seed, self._failure(told, self.step))
        self.evaluation = {"loss": loss, "loss_bf16_forward": bf16}
        self._write(kind="eval", **self.evaluation)
        self.announce(f"step {self.step} of {self.total}: held-out loss {loss:.4f}")

    def _held_out_loss(self) -> float:
        losses = [next_token_loss(self.model, b.to(self.device)) * len(b) for b in self.held_out]
        return float(torch.stack(losses).double().sum()) / sum(len(b) for b in self.held_out)

    def _watch_for_spike(self, loss: float) -> None:
        """A loss far above the recent ones, by a spread that outliers cannot widen (median absolute deviation)."""
        if len(self.recent) == SPIKE_WINDOW:
            middle = statistics.median(self.recent)
            spread = 1.4826 * statistics.median(abs(value - middle) for value in self.recent)
            if loss > middle + max(SPIKE_SIGMAS * spread, SPIKE_NATS):
                self._write(kind="spike", loss=loss)
        self.recent.append(loss)

    def _announce_phase(self) -> None:
        """Writes a line where the recipe's schedule switches, before the first step that runs under the new plan."""
        if self.step == 0 or not self.quantized:
            return
        old, new = (self.arm.recipe.plan(s / self.total) for s in (self.step - 1, self.step))
        changed = [f"{k}: {a} -> {b}" for k, a, b in zip(new._fields, old, new, strict=True) if a != b]
        if changed:
            self._write(kind="phase", progress=self.step / self.total, text=", ".join(changed))

    def _failure(self, tensor: str, step: int | None = None) -> Failure:
        kept = str(self.last_checkpoint) if self.last_checkpoint else None
        return Failure(self.step + 1 if step is None else step, tensor, kept)

    def _diagnose(self) -> str:
        batches = [self._batch(part) for part in range(self.settings.accumulation)]
        return first_bad_output(self.model, lambda: [next_token_loss(self.model, windows) for windows in batches])

    def _write(self, **line: Any) -> None:
        where = {"step": self.step, "tokens": self.step * self.experiment.tokens_per_step}
        line = {"kind": line.pop("kind"), **where, **line}
        self.metrics.write(line)
        self.wandb.write(line)

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step, "optimizer": self.optimizer.state_dict(), "seconds": self.seconds,
            "recent": list(self.recent), "metrics": self.metrics.settle(), "evaluation": self.evaluation,
            "quantizer": randomness.get_state(self.device), "dropout": self.dropout.state,
        }  # fmt: skip

    def _save(self) -> None:
        if weight := first_bad_weight(self.model):  # an overflow in the last update, which no loss has seen yet
            raise TrainingStopped(self.arm.name, self.seed, self._failure(weight, self.step))
        folder = self.folder / "checkpoint"
        self.last_checkpoint = checkpoint.save(folder, self.step, self.model, self._state(), self.identity)

    def _resume(self) -> int:
        """Puts everything back as it was when the last checkpoint was written; where metrics.jsonl must go on."""
        state = checkpoint.load(self.last_checkpoint, self.model, self.identity, self.device)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.recent.extend(state["recent"])
        self.evaluation = state["evaluation"]
        randomness.set_state(self.device, state["quantizer"])
        self.dropout.state = state["dropout"]
        self.announce(f"goes on from step {self.step}")
        return state["metrics"]

    def _finish(self, status: str, failure: Failure | None) -> dict[str, Any]:
        tokens = self.step * self.experiment.tokens_per_step
        result = {
            "arm": self.arm.name, "seed": self.seed, "status": status, "steps": self.step, "tokens": tokens,
            "final_loss": self.evaluation.get("loss"),
            "final_loss_bf16_forward": self.evaluation.get("loss_bf16_forward"),
            "seconds": self.seconds, "tokens_per_s": tokens / self.seconds if self.seconds else 0.0,
            "peak_memory_bytes": _peak_memory(self.device), "failure": self._portable(failure) if failure else None,
        }  # fmt: skip
        self.metrics.settle()
        self.metrics.close()
        self.wandb.close(failed=failure is not None)
        checkpoint.write_whole(self.folder / "result.json", json.dumps(result, indent=1))
        return result

    def _portable(self, failure: Failure) -> dict[str, Any]:
        """As data whose path is relative to the run folder, so that the folder can be moved."""
        kept = failure.checkpoint
        return failure._replace(checkpoint=kept and Path(kept).relative_to(self.folder.parents[1]).as_posix())._asdict()


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
