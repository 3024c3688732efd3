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
from torch import Tensor, nn

from nvfp4_train import conversion, layer_state
from nvfp4_train.conditions import grad_to_noise
from nvfp4_train.experiment import checkpoint, distributed, randomness
from nvfp4_train.experiment.compiling import next_token_loss
from nvfp4_train.experiment.config import Experiment
from nvfp4_train.experiment.data import Corpus
from nvfp4_train.experiment.diagnosis import bad_batch, first_bad_gradient, first_bad_weight
from nvfp4_train.experiment.distributed import World
from nvfp4_train.experiment.errors import ExperimentError, Failure, TrainingStopped
from nvfp4_train.experiment.graphs import Replayed
from nvfp4_train.experiment.model import build_model, build_skeleton, learning_rate
from nvfp4_train.experiment.monitoring import Monitor
from nvfp4_train.experiment.record import choose_device, job_folder, prepare_run
from nvfp4_train.experiment.tracking import MetricsLog, WandbRun, check_wandb
from nvfp4_train.oscillation import after_optimizer_step

SPIKE_WINDOW = 64
SPIKE_SIGMAS = 6.0
SPIKE_NATS = 0.1


def run_job(
    experiment: Experiment, arm: str, seed: int, out: Path, announce: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Trains what is left of one job and returns its result.json; raises TrainingStopped where the numbers break.

    Under torchrun every rank calls it, and every rank returns or raises the same.
    """
    experiment.arm(arm)
    if seed not in experiment.seeds:
        raise ExperimentError(f"{experiment.path} has no seed {seed}; its seeds are {experiment.seeds}")
    check_wandb(experiment)
    folder = job_folder(out, arm, seed)
    device = choose_device(experiment.training)
    with distributed.joined(experiment, arm, seed, device, out) as world, contextlib.ExitStack() as held:
        for turn in (True, False):  # the first rank prepares the folder, then the others read what it left
            with world.together():
                if world.is_first == turn:
                    corpus = prepare_run(experiment, out)
        with world.together():
            if world.is_first:
                held.enter_context(_only_one(folder))
            done = read_result(folder)
        if (done := world.first(done)) is not None:
            if done["failure"]:
                raise TrainingStopped(arm, seed, failure_of(done, out))
            return done
        return Job(experiment, arm, seed, folder, corpus, announce, world).run()


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


class Job:
    """The state of one arm x seed while it trains."""

    def __init__(
        self, experiment: Experiment, arm: str, seed: int, folder: Path, corpus: Corpus,
        announce: Callable[[str], None] = lambda line: None, world: World | None = None,
    ):  # fmt: skip
        self.experiment, self.arm, self.seed = experiment, experiment.arm(arm), seed
        self.folder, self.corpus = folder, corpus
        self.settings = settings = experiment.training
        torch.set_num_threads(settings.threads)
        self.world = world = world or World(choose_device(settings))
        self.announce = announce if world.is_first else lambda line: None
        self.device = world.device
        self.total = experiment.total_steps
        self.quantized = not self.arm.recipe.quantizes_nothing

        vocab = corpus.info.vocab_size
        with world.together():
            skeleton = build_skeleton(experiment, seed, vocab) if world.shares_weights(experiment, self.arm) else None
            whole = None
            if skeleton is None or world.is_first:
                whole = build_model(experiment, seed, vocab, nudged=self.arm.role == "noise_floor")
            self.model = whole.to(self.device) if skeleton is None else skeleton
            if self.quantized:
                conversion.convert(self.model, self.arm.recipe, backend=self.arm.backend)
            for key in ("compile", "cuda_graphs"):
                if getattr(settings, key):
                    randomness.refuse_dropout(self.model, key)
        self.identity = checkpoint.identity(experiment, self.arm, seed, self.model)
        self.laid_out = world.wrap(experiment, self.model)
        if skeleton is not None:
            world.materialise(self.model, whole)
        del whole, skeleton
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.replayed = Replayed(self._forward_backward, self.parameters) if settings.cuda_graphs else None
        self.optimizer = distributed.adamw(self.parameters, settings)
        self.held_out = corpus.held_out_batches(settings.batch_size, experiment.evaluation.batches)

        self.step = 0  # steps done
        self.seconds = 0.0  # spent training, over all the processes that worked on this job
        self.evaluation: dict[str, float | None] = {}  # the latest
        self.recent: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self.dropout = randomness.DropoutStream(self.device, seed)
        self.last_checkpoint = checkpoint.latest(folder / "checkpoint")
        world.agree({"the newest checkpoint in --out": getattr(self.last_checkpoint, "name", None)})
        offset = self._resume() if self.last_checkpoint else 0
        if world.is_first:  # the one that writes
            self.metrics = MetricsLog(folder / "metrics.jsonl", offset)
            self.wandb = WandbRun(experiment, arm, seed, folder)
        self.monitor = Monitor.of(self) if experiment.audit and self.quantized and world.is_first else None
        if self.monitor is not None and self.last_checkpoint:
            self.monitor.restore(self.resumed.get("monitor"))

    def run(self) -> dict[str, Any]:
        try:
            while self.step < self.total:
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
        begin, step, parts = time.perf_counter(), self.step, self.world.parts(self.settings.accumulation)
        if self.quantized:
            self._move_schedule(step)
        rate = learning_rate(self.experiment, self.arm, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        losses = self.world.all_losses([self._watched(part, last=part == parts[-1]) for part in parts])
        self.world.whole_gradients(self.experiment, self.model)
        norm = distributed.total_norm(self.parameters)
        loss_value, norm_value = torch.stack([losses.mean(), norm.float()]).tolist()
        if not math.isfinite(loss_value):
            raise TrainingStopped(self.arm.name, self.seed, self._failure(self._diagnose()))
        if not math.isfinite(norm_value):
            told = self.world.first(first_bad_gradient(self.model)) or "the norm of the gradients is not finite"
            raise TrainingStopped(self.arm.name, self.seed, self._failure(told))
        if self.settings.clip is not None:  # after the checks: clipping by a NaN would make every gradient NaN
            distributed.clip(self.parameters, self.settings.clip, norm)
        if self.monitor is not None:
            self.monitor.before_update(step, self._again if self.world.size == 1 else None)
        self.optimizer.step()
        if self.quantized:
            after_optimizer_step(self.model, step, self.total)
        self.optimizer.zero_grad(set_to_none=self.replayed is None)
        self.step += 1
        if self.monitor is not None:
            self.monitor.after_update()
        elapsed = time.perf_counter() - begin
        self.seconds += elapsed
        self._write(
            kind="train", loss=loss_value, lr=rate, grad_norm=norm_value,
            tokens_per_s=self.experiment.tokens_per_step / elapsed,
        )  # fmt: skip
        self._watch_for_spike(loss_value)

    def _watched(self, part: int, last: bool) -> Tensor:
        if self.monitor is None or part != 0:
            return self._accumulate(part, last)
        with self.monitor.watching(self.step):
            return self._accumulate(part, last)

    def _again(self) -> Tensor:
        """The step's first microbatch once more, with other draws of the quantizer and the same dropout."""
        self.dropout.restart(self.seed, self.step, 0)
        with self.dropout:
            return self._forward_backward(self._batch(0))

    def _accumulate(self, part: int, last: bool) -> Tensor:
        """One microbatch: adds its share to the gradients, returns its loss.

        Its random numbers are its own: whoever works on it, and whatever was worked on before, draws the same.
        """
        windows = self._batch(part)
        torch.manual_seed(randomness.derive_seed("quantizer", self.arm.name, self.seed, self.step, part))
        self.dropout.restart(self.seed, self.step, part)
        with self.dropout, self.world.summing(last):
            if self.replayed is None:
                return self._forward_backward(windows)
            return self.replayed(windows, layer_state.stage(self._layer()) if self.quantized else None)

    def _forward_backward(self, windows: Tensor) -> Tensor:
        loss = next_token_loss(self.laid_out, windows, self.settings.compile)
        (loss / self.settings.accumulation).backward()
        return loss.detach()

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
        self.world.settle()
        if not math.isfinite(loss):
            told = self.world.first(first_bad_weight(self.model)) or "the held-out loss is not finite"
            raise TrainingStopped(self.arm.name, self.seed, self._failure(told, self.step))
        self.evaluation = {"loss": loss, "loss_bf16_forward": bf16}
        self._write(kind="eval", **self.evaluation)
        if self.monitor is not None:
            self.monitor.after_evaluation(self.step, loss)
        self.announce(f"step {self.step} of {self.total}: held-out loss {loss:.4f}")

    def _held_out_loss(self) -> float:
        count = len(self.held_out)
        share = -(-count // self.world.data_ranks)  # the last rank may repeat the last batch, to keep in step
        losses = []
        for number in range(self.world.data_rank * share, (self.world.data_rank + 1) * share):
            torch.manual_seed(randomness.derive_seed("evaluation", self.seed, number))
            batch = self.held_out[min(number, count - 1)]
            losses.append(next_token_loss(self.model, batch.to(self.device), self.settings.compile) * len(batch))
        losses = self.world.all_losses(losses)[:count]
        return float(losses.double().sum()) / sum(len(b) for b in self.held_out)

    def _watch_for_spike(self, loss: float) -> None:
        """A loss far above the recent ones, by a spread that outliers cannot widen (median absolute deviation)."""
        if len(self.recent) == SPIKE_WINDOW:
            middle = statistics.median(self.recent)
            spread = 1.4826 * statistics.median(abs(value - middle) for value in self.recent)
            if loss > middle + max(SPIKE_SIGMAS * spread, SPIKE_NATS):
                self._write(kind="spike", loss=loss)
                if self.monitor is not None:
                    self.monitor.spike(loss)
        self.recent.append(loss)

    def _layer(self) -> nn.Module:
        """One converted layer: all follow one schedule."""
        return next(iter(conversion.converted_layers(self.model).values()))

    def _move_schedule(self, step: int) -> None:
        """Begins a step for the recipe, and writes a line where its schedule switches."""
        old = self._layer().plan
        switched = conversion.set_progress(self.model, step, self.total, self._measured(step))
        if switched and step:
            new = self._layer().plan
            changed = [f"{k}: {a} -> {b}" for k, a, b in zip(new._fields, old, new, strict=True) if a != b]
            self._write(kind="phase", progress=step / self.total, text=", ".join(changed))

    def _measured(self, step: int) -> dict[str, float]:
        """What phases of the schedule wait for, measured as often as the held-out loss; nothing for most recipes."""
        reached = getattr(self._layer(), "reached", ())
        waiting = [i for i, phase in enumerate(self.arm.recipe.schedule) if phase.when and i not in reached]
        if not waiting or not step or step % self.experiment.evaluation.every:
            return {}
        if self.world.size > 1:
            raise ExperimentError(
                f"recipe {self.arm.recipe.name} waits for a measured condition, which is measured on one rank only: "
                "train it on one"
            )
        self.model.train()
        torch.manual_seed(randomness.derive_seed("measurement", self.seed, step))
        ratio = grad_to_noise(self.model, self._again)
        self._write(kind="measured", grad_to_noise=ratio if math.isfinite(ratio) else None)
        return {"grad_to_noise": ratio}

    def _failure(self, tensor: str, step: int | None = None) -> Failure:
        kept = str(self.last_checkpoint) if self.last_checkpoint else None
        return Failure(self.step + 1 if step is None else step, tensor, kept)

    def _diagnose(self) -> str:
        batches = [self._batch(part) for part in self.world.parts(self.settings.accumulation)]
        weight = self.world.first(first_bad_weight(self.model))  # all ranks run the batches again, or none
        run = lambda: [next_token_loss(self.model, windows) for windows in batches]  # noqa: E731
        return weight or self.world.first(bad_batch(self.model, run)) or "the loss is not finite"

    def _write(self, **line: Any) -> None:
        if not self.world.is_first:
            return
        where = {"step": self.step, "tokens": self.step * self.experiment.tokens_per_step}
        line = {"kind": line.pop("kind"), **where, **line}
        self.metrics.write(line)
        self.wandb.write(line)

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step, "seconds": self.seconds, "recent": list(self.recent),
            "metrics": self.metrics.settle() if self.world.is_first else 0, "evaluation": self.evaluation,
            "monitor": None if self.monitor is None else self.monitor.state(),
            "quantizer": layer_state.quantizer_state(self.model),
        }  # fmt: skip

    def _save(self) -> None:
        # an overflow in the last update, which no loss has seen yet
        if weight := self.world.first(first_bad_weight(self.model)):
            raise TrainingStopped(self.arm.name, self.seed, self._failure(weight, self.step))
        folder, state = self.folder / "checkpoint", self._state()
        if self.world.size == 1:
            state["optimizer"] = self.optimizer.state_dict()
            self.last_checkpoint = checkpoint.save(folder, self.step, self.model, state, self.identity)
        else:
            self.last_checkpoint = checkpoint.save_shards(
                folder, self.step, self.model, self.optimizer, state, self.identity, self.world,
                whole=self.step == self.total,
            )  # fmt: skip

    def _resume(self) -> int:
        """Puts everything back as it was when the last checkpoint was written; where metrics.jsonl must go on."""
        state = checkpoint.resume(self.last_checkpoint, self.model, self.optimizer, self.identity, self.world)
        self.resumed = state
        self.step, self.seconds = state["step"], state["seconds"]
        self.recent.extend(state["recent"])
        self.evaluation = state["evaluation"]
        layer_state.load_quantizer_state(self.model, state.get("quantizer", {}))
        if self.quantized and self.step:  # where the schedule stood, so that the next step tells what it changes
            conversion.set_progress(self.model, self.step - 1, self.total)
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
        if self.world.is_first:
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
