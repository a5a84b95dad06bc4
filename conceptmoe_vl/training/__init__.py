"""Training: configuration of runs, DeepSpeed and torch engines, the trainer, checkpoints and
metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from conceptmoe_vl.lazy_names import lazy_names

if TYPE_CHECKING:
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

# At their first use: the curves of a run are drawn without torch. `distributed` is a module.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "EvaluationSection": "config",
        "ModelSection": "config",
        "RunConfig": "config",
        "Trainer": "trainer",
        "TrainingConfig": "config",
        "World": "distributed",
        "load_run_config": "config",
    },
)
