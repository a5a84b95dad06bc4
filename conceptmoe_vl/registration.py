"""Makes transformers' Auto classes know the model as soon as transformers is there, and no sooner.

Model and processor take seconds to import (torch, timm, transformers): too long for a program that
prints its help, and for code that reads shards. Yet `AutoModel` must find the model behind
`import conceptmoe_vl`, whichever of the two packages is imported first and by whom. So what follows
holds at any time: when transformers has been imported, and no module of this package is in the
middle of its own import (where half of its names do not exist yet), the classes are registered.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGE = __name__.partition(".")[0]


class RegisterBehindImports(MetaPathFinder):
    """Finds modules as the other finders do; looks behind the import of some whether it is time."""

    def __init__(self) -> None:
        self._finding: set[str] = set()
        self._running = 0  # modules of this package that are being executed
        self._is_registered = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_own = name.startswith(_PACKAGE + ".")
        if not (is_own or name == "transformers") or name in self._finding or self._is_registered:
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)  # asks the other finders: this one passes
        finally:
            self._finding.discard(name)
        if spec is not None and spec.loader is not None:
            # On the instance: the loader stays what it is for everyone who asks it for more.
            execute = partial(self._execute, spec.loader.exec_module, is_own)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec

    def _execute(
        self, execute: Callable[[ModuleType], None], is_own: bool, module: ModuleType
    ) -> None:
        self._running += is_own
        try:
            execute(module)
        finally:
            self._running -= is_own
        self.register_when_possible()

    def register_when_possible(self) -> None:
        """Registers, once, if transformers is there and no module of this package is half done."""
        if self._is_registered or self._running or "transformers" not in sys.modules:
            return
        self._is_registered = True
        register()


def register() -> None:
    """Registers configuration, model and processor with transformers' Auto classes."""
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMultimodalLM,
    )

    from conceptmoe_vl import processing
    from conceptmoe_vl.configuration import ConceptMoEVLConfig
    from conceptmoe_vl.modeling import ConceptMoEVLForConditionalGeneration

    AutoConfig.register(ConceptMoEVLConfig.model_type, ConceptMoEVLConfig)
    for auto in (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMultimodalLM,
    ):
        auto.register(ConceptMoEVLConfig, ConceptMoEVLForConditionalGeneration)
    processing.register()
