"""The model as an external model of public evaluation harnesses.

All call `conceptmoe_vl.continuous_batching`, as the own runner does: the same prompts give the
same answers and log-likelihoods.
"""

from __future__ import annotations

from typing import Any


def lmms_eval_manifest() -> Any:
    """What lmms-eval's entry-point group `lmms_eval.models` asks for; imports nothing heavy."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(
        model_id="conceptmoe_vl",
        simple_class_path="eval.adaptors.lmms_eval.ConceptMoEVLSimple",
        chat_class_path="eval.adaptors.lmms_eval.ConceptMoEVLChat",
    )
