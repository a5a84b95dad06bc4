"""Training: configuration of runs, DeepSpeed and torch engines, the trainer, checkpoints and
metrics.
"""

from . import distributed
from .config import EvaluationSection, ModelSection, RunConfig, TrainingConfig, load_run_config
from .distributed import World
from .trainer import Trainer

__all__ = [
    "EvaluationSection",
    "ModelSection",
    "RunConfig",
    "Trainer",
    "TrainingConfig",
    "World",
    "distributed",
    "load_run_config",
]
