"""ConceptMoE-VL: vision-language models that merge similar neighbouring tokens into concepts.

Shape legend, used as suffixes everywhere in the package: `B` batch rows, `T` packed tokens,
`M` packed concepts, `P` packed patches, `D` model width, `C` concept width, `N` heads, `H` head
size, `E` experts, `K` experts per token, `F` expert width, `V` vocabulary, `G` documents,
`I` images, `S` a selection that the docstring names. A tensor without a suffix is a scalar or has
its shape in the docstring.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from conceptmoe_vl.lazy_names import lazy_names
from conceptmoe_vl.registration import RegisterBehindImports

if TYPE_CHECKING:
    from conceptmoe_vl.configuration import ConceptMoEVLConfig
    from conceptmoe_vl.modeling import ConceptMoEVLForConditionalGeneration
    from conceptmoe_vl.processing import ConceptMoEVLProcessor

__version__ = "0.1.0"
__all__ = ["ConceptMoEVLConfig", "ConceptMoEVLForConditionalGeneration", "ConceptMoEVLProcessor"]

# At their first use: torch, timm and transformers take seconds to import.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ConceptMoEVLConfig": "configuration",
        "ConceptMoEVLForConditionalGeneration": "modeling",
        "ConceptMoEVLProcessor": "processing",
    },
)

_registering = RegisterBehindImports()
sys.meta_path.insert(0, _registering)
_registering.register_when_possible()
