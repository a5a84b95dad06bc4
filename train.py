"""Trains a model.

    python train.py --config configs/easy_vqa.yaml [key=value ...]                one process
    python -m conceptmoe_vl_launch --nproc_per_node 2 train.py --config ...       several
    deepspeed --hostfile hosts train.py --config ...                              and machines
    sbatch configs/slurm/train.sbatch --config ...                                on SLURM

A run writes one folder (see docs/training.md); the same command again resumes it.
"""

from __future__ import annotations

import argparse
import sys


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a ConceptMoE-VL model from a YAML configuration.",
        epilog="Overrides take dotted keys: training.max_steps=100 model.chunk.target_ratio=4",
    )
    parser.add_argument("--config", required=True, help="YAML file, as configs/easy_vqa.yaml")
    # the deepspeed launcher's
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration overrides")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    parse_arguments(None)  # --help and a wrong call end here, before seconds of imports

# ruff: noqa: E402  (the lines below must run before torch is imported)
import conceptmoe_vl_runtime

conceptmoe_vl_runtime.setup()

import dataclasses
import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.training import RunConfig, Trainer, World, distributed, load_run_config
from conceptmoe_vl.training.build import (
    begin_again,
    build_model,
    prepare_processor,
    recover_run,
    require_same_model,
)
from conceptmoe_vl.training.peers import LOST_STATUS
from data_pipelines.config import DataConfig
from data_pipelines.opening import iter_source_texts
from data_pipelines.stream import build_stream


def held_out_batches(
    config: RunConfig, processor: Any, world: World
) -> Callable[[], Iterator[Any]] | None:
    """Makes the held-out batches of this rank, in a fixed order and without augmentation.

    Sources without weights are gone through once: no sample counts twice, and a rank without one
    takes part all the same. A mixture has no end; shuffled, every rank comes to every sample.
    """
    if config.evaluation.data is None:
        return None
    plain = {"shuffle": False, "augment": "none", "num_workers": 0, "epochs": None}
    given, training = config.evaluation.data, dict(config.data)
    if "shards" in given or "sources" in given:  # in place of those of training
        training = {key: training[key] for key in training.keys() - {"shards", "sources"}}
    settings = DataConfig.from_mapping(given, {**training, **plain})
    is_mixture = any(each.weight for each in settings.source_configs)
    order = {"shuffle": True} if is_mixture else {"epochs": 1}
    settings = dataclasses.replace(settings, **{**order, **given})

    # Now, not at the first evaluation: shards that are missing are no news after days of training.
    stream = build_stream(settings, processor, world.rank, world.size)
    start = stream.state_dict()

    def batches() -> Iterator[Any]:
        stream.load_state_dict(start)
        return itertools.islice(stream, config.evaluation.batches)

    return batches


def build_trainer(config: RunConfig, world: World) -> Trainer:
    """Processor, model, stream and trainer of a run; resumes it if it has a checkpoint."""
    recover_run(config, world)
    require_same_model(config)
    data = DataConfig.from_mapping(config.data)
    processor = prepare_processor(config, world, lambda limit: iter_source_texts(data, limit))
    model = build_model(config, processor)
    stream = build_stream(data, processor, world.rank, world.size)
    trainer = Trainer(
        model,
        stream,
        config.training,
        config.run_dir,
        world,
        processor=processor,
        generation=config.model.generation,
        held_out=held_out_batches(config, processor, world),
        evaluate_every=config.evaluation.every,
    )
    if begin_again(config, world):
        trainer.reporter.say("this run ended before its first checkpoint; it starts anew")
    trainer.resume()
    if world.is_main:
        config.save(Path(config.run_dir) / "config.yaml")
    return trainer


def train(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    parsed = parse_arguments(arguments)
    config = load_run_config(parsed.config, parsed.overrides)
    training = config.training
    world = distributed.start(
        training.engine, training.device, training.timeout_minutes, training.threads
    )
    trainer = build_trainer(config, world)
    # Windows has no SIGUSR1.
    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGUSR1", signal.SIGTERM)):
        signal.signal(number, trainer.request_stop)
    trainer.train()
    if trainer.stopped_by is not None:
        status = training.stopped_exit_status
        return 128 + trainer.stopped_by if status is None else status
    trainer.export()
    return 0


def main(arguments: list[str] | None = None) -> int:
    """`train`, with mistakes and lost ranks as one line and the process group left in any case."""
    try:
        return train(arguments)
    except KeyboardInterrupt:  # before there is anything to save, or the second one
        print("error: interrupted; the same command resumes the run", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = distributed.of_disk(caught)
        if not distributed.report_failure(error):
            raise
        return 2 if isinstance(error, UserError) else LOST_STATUS
    finally:
        distributed.stop()


if __name__ == "__main__":
    sys.exit(main())
