"""Settings of generation that a model's folder holds: known, without contradiction, and writable.

Transformers passes over what it does not know without a word, reads settings of sampling where
nothing is sampled, and refuses to write them.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import GenerationConfig

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.field_checks import check_known_keys

_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "top_h"),
    *("typical_p", "epsilon_cutoff", "eta_cutoff"),
)
_TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id"}


def leave_out_sampling(generation: GenerationConfig) -> None:
    """Takes settings of sampling away where nothing is sampled: they have no effect there."""
    if generation.do_sample is not True:
        for name in _SAMPLING:
            if hasattr(generation, name):
                setattr(generation, name, None)


def changed_generation(
    before: GenerationConfig, given: dict[str, Any] | None, where: str
) -> GenerationConfig:
    """Other settings, with those of `given` on top.

    Where `given` ends sampling, the settings of sampling in `before` end as well.

    Raises:
        UserError: `given`, a configuration section of this name, holds an unknown setting, or the
            settings contradict one another.
    """
    given, changed = given or {}, copy.deepcopy(before)
    known = {name for name in before.to_dict() if name[0] != "_"} - {"transformers_version"}
    try:
        check_known_keys(given, known, where)
        changed.update(do_sample=given.get("do_sample", before.do_sample))
        leave_out_sampling(changed)
        changed.update(**given)
        changed.validate(strict=True)
        for name in _TOKENS & given.keys():
            ids = given[name] if isinstance(given[name], list) else [given[name]]
            if not all(type(each) is int and each >= 0 for each in ids if given[name] is not None):
                raise ValueError(f"{name} is {given[name]!r}; give a token's number")
    except (ValueError, TypeError) as error:
        said = " ".join(str(error).split())[:300]
        raise UserError(said if where in said else f"{where} cannot be used: {said}") from error
    return changed
