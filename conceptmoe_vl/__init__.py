"""ConceptMoE-VL: vision-language models that merge similar neighbouring tokens into concepts.

Shape legend, used as suffixes everywhere in the package: `B` batch rows, `T` packed tokens,
`M` packed concepts, `P` packed patches, `D` model width, `C` concept width, `N` heads, `H` head
size, `E` experts, `K` experts per token, `F` expert width, `V` vocabulary, `G` documents,
`I` images, `S` a selection that the docstring names. A tensor without a suffix is a scalar or has
its shape in the docstring.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
)

from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.modeling import ConceptMoEVLForConditionalGeneration
from conceptmoe_vl.processing import ConceptMoEVLProcessor, register

AutoConfig.register(ConceptMoEVLConfig.model_type, ConceptMoEVLConfig)
for _auto in (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
):
    _auto.register(ConceptMoEVLConfig, ConceptMoEVLForConditionalGeneration)
register()

__version__ = "0.1.0"
__all__ = ["ConceptMoEVLConfig", "ConceptMoEVLForConditionalGeneration", "ConceptMoEVLProcessor"]
