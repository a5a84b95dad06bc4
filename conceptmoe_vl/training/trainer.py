"""The training loop as a class that a test can drive step by step.

Notable:
- the loss is the mean over supervised tokens of the whole optimiser step, over all ranks and
  micro-batches (DESIGN.md invariant 9): every step first sums the supervised tokens of all ranks;
- every reported loss is a sum over all ranks, from the first step on;
- a step whose loss or gradient is not finite changes no weight; it is counted, and its samples'
  keys are written to nonfinite.jsonl;
- a resumed run gives the losses of the unbroken one bit for bit (invariant 7).
"""

from __future__ import annotations

import functools
import math
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError

from .checkpoint import (
    checkpoint_before,
    find_checkpoint,
    load_checkpoint,
    require_unused,
    save_checkpoint,
)
from .chunk_schedule import ChunkScheduler
from .config import TrainingConfig
from .distributed import World, ensure_folder, raise_together, sum_over_ranks, wait_for_all
from .engine import build_engine
from .export import export_merged
from .fetching import fetch
from .health import FiniteGuard, SpikeGuard
from .held_out import evaluate_held_out
from .metrics import StepStatistics, peak_memory_bytes
from .parameters import summarise_parts
from .preparing import prepare_model
from .progress import Reporter
from .random_states import set_seed
from .resuming import batch_of_run
from .run_files import drop_lines_after
from .run_log import RunLog
from .schedule import run_progress, set_learning_rates
from .speed import Speed
from .watch import RunWatch

_NO_DATA = "the data gave no batch on any process; look at data.held_out, data.split and the shards"


class Trainer:
    """Trains a model on a stream of packed batches.

    Args:
        model: `ConceptMoEVLForConditionalGeneration`, or a module that takes the same arguments.
        stream: iterator over packed batches of this rank, with `state_dict`, `load_state_dict`,
            `skipped`, `over_length` (counts by reason), `delivered` (by source) and `filler()`.
        config: the `training` section. run_dir: folder of the run.
        world: from `distributed.start`.
        processor, generation: saved with the exported model; the latter are its settings.
        held_out: returns a fresh iterable of held-out batches.
        evaluate_every: optimiser steps between two evaluations; 0: at the end of the run alone.

    Attributes:
        step_number, samples, tokens, seconds: optimiser steps done, documents and tokens seen by
            all ranks, time trained (across resumes).
        nonfinite_steps: steps that were skipped because something was not finite.
        stopped_by: number of the signal that ended the run early, on every rank; None: none did.
    """

    def __init__(
        self,
        model: Any,
        stream: Any,
        config: TrainingConfig,
        run_dir: str | Path,
        world: World,
        processor: Any = None,
        generation: dict | None = None,
        held_out: Callable[[], Iterable[Any]] | None = None,
        evaluate_every: int = 0,
    ) -> None:
        self.run_dir, self.reporter = Path(run_dir), Reporter(world.is_main)
        config = batch_of_run(config, self.run_dir / "checkpoints", world, self.reporter.say)
        self.config, self.world, self.stream = config, world, stream
        self._processor, self._generation = processor, generation
        self._held_out, self._evaluate_every = held_out, evaluate_every
        self._image_token_id = getattr(getattr(model, "config", None), "image_token_id", None)
        prepare_model(model, config)
        self.reporter.show_parts(summarise_parts(model, config), config)
        self._speed = Speed(model, world, config)
        self.reporter.say(str(self._speed.peak))
        self.engine = build_engine(model, config, world)
        self.engine.module.train()
        self._chunks = ChunkScheduler(self.engine.module, config.chunk_schedule)
        self.step_number = self.samples = self.tokens = 0
        self.seconds = 0.0
        self.stopped_by: int | None = None
        self._requested_stop: int | None = None
        self._ended = False
        self._batches = iter(stream)
        ensure_folder(self.run_dir, world)
        path, say = self.run_dir / "nonfinite.jsonl", self.reporter.say
        self._finite = FiniteGuard(config.max_nonfinite_steps, path, world, say)
        self._watch = RunWatch(config.watch, config.chunk_schedule.ratio_warmup)
        self._spikes = SpikeGuard(config.spike_guard)
        self._log = RunLog(self.run_dir, config, world, say)
        # Every rank samples its own noise from here on; weights were made from the common seed.
        set_seed(config.seed + 1 + world.rank)

    @property
    def progress(self) -> float:
        """Share of the run that is done, 0 to 1."""
        return run_progress(self.config, self.step_number, self.seconds)

    @property
    def nonfinite_steps(self) -> int:
        return self._finite.steps

    def request_stop(self, signal_number: int, frame: Any = None) -> None:
        """Signal handler: ends the run after the present step with a checkpoint;
        a second one ends it now.
        """
        if self._requested_stop is not None:
            raise KeyboardInterrupt
        self._requested_stop = signal_number
        self.reporter.say("stopping after this step; once more stops at once, without a checkpoint")

    def step(self) -> dict[str, Any] | None:
        """One optimiser step. Collective.

        Returns:
            The metrics of the step, the same on every rank; None when the streams of all ranks have
            ended. A rank whose stream has ended before others' takes part with filler batches.

        Raises:
            UserError: the loss or gradient was not finite `max_nonfinite_steps` times in a row.
        """
        started = time.perf_counter()
        batches, nothing = fetch(self._batches, self.stream, self.config)
        waited = time.perf_counter() - started
        supervised, used = self._count(batches, nothing)
        if not used:
            return None
        rates = set_learning_rates(self.engine.optimizer, self.config, self.progress)
        targets = self._chunks.set(self.progress)
        step = self.step_number + 1
        is_last = self.stopped_by is not None or run_progress(self.config, step, self.seconds) >= 1
        logged = is_last or step == 1 or step % self.config.log_every == 0
        statistics = StepStatistics(self._image_token_id, detailed=logged)
        # The engine divides by all micro-batches; those that are filler on every rank do not count.
        per_call, scale = max(supervised, 1) / (self.world.size * used), len(batches) / used
        for number, batch in enumerate(batches):
            placed = batch.to(self.world.device)
            out = self.engine.forward(**placed.model_inputs(), num_items_in_batch=per_call)
            if number < used:
                statistics.add(placed, out)
                self._speed.look(batch, out)
            self.engine.backward(out.loss * scale)
            del out
        metrics = statistics.reduce_losses(self.world.size, self.world.device)
        norm = self.engine.step(cancel=not math.isfinite(metrics["loss"]))
        self.step_number += 1
        metrics |= {**targets, **rates, "grad_norm": norm, "supervised_tokens": int(supervised)}
        self._finite.look(self.step_number, metrics, (key for b in batches for key in b.keys))
        seconds = time.perf_counter() - started
        self.seconds += seconds
        self._speed.add(seconds, waited)
        counters = {"step": self.step_number, "samples": self.samples, "tokens": self.tokens}
        metrics = {**counters, **metrics}
        with self._log.step(metrics, functools.partial(self._details, statistics), logged):
            warnings = self._watch.look(metrics, self.progress, statistics.relative_load)
            self._log.warn(self.step_number, warnings)
        return metrics

    def _details(self, statistics: StepStatistics) -> dict[str, Any]:
        """What a line of metrics.jsonl has beside every step's metrics. Collective."""
        details = {**statistics.reduce_details(self.stream), **self._speed.take()}
        details |= {"seconds": self.seconds, "epoch": getattr(self.stream, "epoch", 0)}
        return {**details, "peak_memory": peak_memory_bytes(self.world.device)}

    def _count(self, batches: list[Any], nothing: str | None) -> tuple[float, int]:
        """Advances the run's counters.

        Args:
            nothing: what the stream said, if none of this rank's samples is usable.

        Returns:
            Of the step over all ranks: its supervised tokens, and its micro-batches that are no
            filler on some rank; they come first. 0 when the streams of all ranks have ended.

        Raises:
            UserError: no sample of any rank is usable.
        """
        own = [batch for batch in batches if not batch.is_filler]
        counts = [
            float(sum(batch.num_supervised for batch in own)),
            float(sum(batch.cu_seqlens.numel() - 1 for batch in own)),
            float(sum(batch.input_ids.numel() for batch in own)),
            self.seconds / self.world.size,
            float(self._requested_stop or 0),
            float(nothing is not None),
            *(float(not batch.is_filler) for batch in batches),
        ]
        summed = sum_over_ranks(counts, self.world.device)
        supervised, samples, tokens, self.seconds, stop, without, *ranks = summed
        used = sum(count > 0 for count in ranks)
        if not used:
            if without and (without == self.world.size or not self.samples):
                raise_together(None if nothing is None else UserError(nothing))
            self._ended = True
            return 0.0, 0
        if stop:
            self.stopped_by = self._requested_stop or int(signal.SIGTERM)
        self.samples += int(samples)
        self.tokens += int(tokens)
        if not supervised:
            self.reporter.say(
                f"warning: step {self.step_number + 1} has no supervised token on any rank; only "
                "the auxiliary losses act. Look at the data with 'python -m data_pipelines show'"
            )
        return supervised, used

    def train(self) -> dict[str, Any] | None:
        """Runs to the end of the run: steps, checkpoints, evaluations. Collective.

        Returns:
            The metrics of the last step, or None when the run had already ended.
        """
        last = None
        try:
            if self._is_due(self._evaluate_every):
                self._evaluate_once()
            while not self._is_finished():
                metrics = self.step()
                if metrics is None:
                    if not self.step_number:
                        raise UserError(_NO_DATA)
                    break
                last = metrics
                if self._spikes.look(metrics) and self.roll_back():
                    continue
                self.reporter.update(metrics, self.progress)
                if self._is_due(self.config.checkpoint_every):
                    self.save_checkpoint()
                if self._is_due(self._evaluate_every):
                    self.evaluate()
        except UserError:
            self._log.close()
            raise
        finally:
            self.reporter.close()
        if last is not None:
            self._log.last_step()
            self._finish()
        else:
            self._evaluate_once()
        self._log.close()
        return last

    def _finish(self) -> None:
        """The last checkpoint and evaluation, where the loop has not just made them."""
        stopped = self.stopped_by is not None
        wanted = self.config.checkpoint_at_end or stopped
        if wanted and not self._is_due(self.config.checkpoint_every):
            self.save_checkpoint()
        if self._held_out is not None and not stopped and not self._is_due(self._evaluate_every):
            self.evaluate()

    def _is_finished(self) -> bool:
        """Agreed between the ranks, whose clocks differ."""
        if self._ended or self.stopped_by is not None:
            return True
        if self.config.max_minutes is None:
            return self.progress >= 1
        total = sum_over_ranks([self.progress], self.world.device)[0]
        return total >= self.world.size

    def _evaluate_once(self) -> None:
        """The evaluation that a run killed behind its checkpoint has not come to."""
        if self._held_out is not None and not self._log.has_evaluation(self.step_number):
            self.evaluate()

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.step_number > 0 and self.step_number % every == 0

    def save_checkpoint(self) -> Path:
        """Writes checkpoints/step-N of the present step. Collective."""
        counters = {
            "step": self.step_number,
            "samples": self.samples,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "nonfinite_steps": self.nonfinite_steps,
            "nonfinite_in_a_row": self._finite.in_a_row,
            "spikes": self._spikes.state_dict(),
        }
        folder = self.run_dir / "checkpoints"
        return save_checkpoint(
            folder, self.step_number, counters, self.engine, self.stream, self.config, self.world
        )

    def resume(self) -> bool:
        """Continues from the checkpoint that `training.resume` means. Collective.

        Returns:
            Whether there was one.

        Raises:
            UserError: the checkpoint is damaged or was written by a run of another shape.
        """
        folder, say = self.run_dir / "checkpoints", self.reporter.say
        path = find_checkpoint(folder, self.config, self.world, say)
        if path is None:
            require_unused(self.run_dir)
            return False
        counters = load_checkpoint(path, self.engine, self.stream, self.config, self.world)
        self._batches = iter(self.stream)
        self.seconds, self._finite.steps = counters["seconds"], counters["nonfinite_steps"]
        self._finite.in_a_row = counters["nonfinite_in_a_row"]
        self._spikes.load_state_dict(counters["spikes"])
        self._go_to(counters, "metrics.jsonl", "evaluation.jsonl", "nonfinite.jsonl")
        self._log.keep_rollbacks(self._spikes.rollbacks)
        self.reporter.say(f"resumed from {path} after step {self.step_number}")
        return True

    def _go_to(self, counters: dict[str, Any], *files: str) -> None:
        """Takes a checkpoint's place in the run; drops the files' lines of later steps."""
        self.step_number = counters["step"]
        self.samples, self.tokens = counters["samples"], counters["tokens"]
        self._chunks.set(self.progress)
        self._log.forget_step()
        if self.world.is_main:
            for name in files:
                drop_lines_after(self.run_dir / name, self.step_number)
        wait_for_all()

    def roll_back(self) -> bool:
        """Goes on from the newest checkpoint before the spike, with the data after it. Collective.

        The data since that checkpoint are not seen again: a checkpoint written at once says so.

        Returns:
            Whether there was a checkpoint.
        """
        step, losses = self.step_number, list(self._spikes.losses)
        folder, say = self.run_dir / "checkpoints", self.reporter.say
        path = checkpoint_before(folder, step - len(losses) + 1, self.world, say)
        what = f"the language loss spiked ({', '.join(f'{loss:.3f}' for loss in losses)})"
        if path is None:
            self._spikes.give_in()
            self._log.warn(step, [f"{what}, and there is no checkpoint to go back to"])
            return False
        seen = self.samples
        counters = load_checkpoint(path, self.engine, None, self.config, self.world)
        self._spikes.went_back()
        self._go_to(counters, "metrics.jsonl", "evaluation.jsonl")
        skipped = seen - self.samples
        self._log.rollback(step, self.step_number, losses, skipped)
        self.save_checkpoint()
        self._log.warn(
            step, [f"{what}; back to step {self.step_number}, {skipped} samples skipped"]
        )
        return True

    def evaluate(self) -> dict[str, Any]:
        """Loss and ratio on the held-out batches, without touching the training stream. Collective.

        Returns:
            step, lm_loss (mean over supervised tokens of all ranks), ratio, and ratio by modality.
        """
        if self._held_out is None:
            raise UserError("there is no held-out data: set evaluation.data")
        measured = evaluate_held_out(
            self.engine, self._held_out, self.stream.filler, self._image_token_id, self.world
        )
        result = {"step": self.step_number, **measured}
        self._log.evaluation(result)
        self.reporter.say(f"held-out loss {result['lm_loss']:.4f} after step {self.step_number}")
        return result

    def export(self) -> Path:
        """Writes run_dir/model, which `from_pretrained` loads. Collective.

        Raises:
            RuntimeError: a saved weight is missing or has not its full shape.
        """
        target = self.run_dir / "model"
        self._log.warn(self.step_number, self._chunks.unfinished())
        weights = self.engine.gather_weights()
        if weights is not None:
            saved = (self.config.lora, self._processor, self._generation)
            export_merged(self.engine.module, weights, target, *saved)
        wait_for_all()
        self.reporter.say(f"model written to {target}")
        return target
