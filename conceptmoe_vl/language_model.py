"""The ConceptMoE language model: encode, chunk, concept model, dechunk, decode.

See Figure 1 of the paper.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from conceptmoe_vl.cache import ConceptCache
from conceptmoe_vl.chunk import Boundaries, ChunkModule, TokenKinds
from conceptmoe_vl.concepts import (
    ConceptMap,
    OpenChunks,
    doublings_for,
    map_concepts,
    merge_tokens,
    plug_back,
    smooth,
)
from conceptmoe_vl.configuration import ChunkConfig, TextConfig
from conceptmoe_vl.journal import record_call
from conceptmoe_vl.layers import Layer, RMSNorm, Stack
from conceptmoe_vl.layout import PackedLayout
from conceptmoe_vl.moe import RouterStatistics
from conceptmoe_vl.products import Linear


@dataclasses.dataclass(frozen=True)
class LanguageModelOutput:
    """States of the T tokens after the final norm, and how they came about.

    Attributes:
        hidden_TD: `[T, D]`. boundaries, concepts: the chunk module's decisions and the concept map.
        routers: statistics of every executed MoE layer by stage: encoder, concept, decoder.
    """

    hidden_TD: Tensor
    boundaries: Boundaries
    concepts: ConceptMap
    routers: dict[str, list[RouterStatistics]]


class ConceptMoELanguageModel(nn.Module):
    """Encoder E, chunk module, concept model C, dechunk and decoder D over one packed stream.

    Args:
        text, chunk: configuration sections.
    """

    def __init__(self, text: TextConfig, chunk: ChunkConfig) -> None:
        super().__init__()
        self.chunk_config = chunk
        d, width = text.hidden_size, text.width_of_concepts
        joint_from = text.decoder_layers - chunk.joint_decoding_layers
        encoder = [Layer(text) for _ in range(text.encoder_layers)]
        concept = [Layer(text, concept=True) for _ in range(text.concept_layers)]
        decoder = [Layer(text, joint=index >= joint_from) for index in range(text.decoder_layers)]
        self.encoder = Stack(encoder, list(range(text.encoder_layers)), text)
        self.chunk = ChunkModule(chunk, d)
        self.to_concept = Linear(d, width, bias=False) if width != d else nn.Identity()
        self.concept = Stack(concept, text.concept_schedule, text)
        self.from_concept = Linear(width, d, bias=False) if width != d else nn.Identity()
        self.decoder = Stack(decoder, list(range(text.decoder_layers)), text)
        self.norm = RMSNorm(d, text.rms_norm_eps)

    def forward(
        self,
        x_TD: Tensor,
        layout: PackedLayout,
        kinds: TokenKinds,
        cache: ConceptCache | None = None,
        compression: float | None = None,
        statistics: bool = True,
    ) -> LanguageModelOutput:
        """Runs the five steps of the method.

        Args:
            x_TD: token embeddings. layout: documents. kinds: modalities and forced boundaries.
            cache: read and written; its rows are the documents.
            compression: wanted tokens per concept; None means what the model was trained for.
            statistics: gather the routers' statistics, which only the losses need.
        """
        before = None if cache is None else dataclasses.replace(cache.chunk)
        h_TD, encoder = self.encoder(x_TD, layout, None, cache and cache.encoder, statistics)
        boundaries, concepts, c_MD = self._chunk(h_TD, layout, kinds, cache, compression)
        c_MC = self.to_concept(c_MD)
        changed_MC, concept = self._concept_model(c_MC, concepts, cache, statistics)
        dechunked = self._dechunk(h_TD, c_MC, changed_MC, boundaries, concepts, cache)
        record = None
        if cache is not None and before is not None:
            summed = before.open_chunks or cache.chunk.open_chunks
            record = record_call(
                before,
                (cache.token_lengths, cache.concept_lengths),
                cache.columns_of_call,
                layout,
                kinds,
                boundaries,
                None if summed is None else h_TD,
                dechunked.smoothed_MD,
            )
        read = (dechunked.concept_XD, dechunked.read_T)
        y_TD, decoder = self.decoder(
            dechunked.z_TD, layout, read, cache and cache.decoder, statistics
        )
        if cache is not None and record is not None:
            cache.advance(record, layout.lengths, concepts.layout.lengths)
        routers = {"encoder": encoder, "concept": concept, "decoder": decoder}
        return LanguageModelOutput(self.norm(y_TD), boundaries, concepts, routers)

    def _chunk(
        self,
        h_TD: Tensor,
        layout: PackedLayout,
        kinds: TokenKinds,
        cache: ConceptCache | None,
        compression: float | None,
    ) -> tuple[Boundaries, ConceptMap, Tensor]:
        state = None if cache is None else cache.chunk
        last_key_GD = None if state is None else state.last_key_GD
        boundaries = self.chunk(h_TD, kinds, layout, last_key_GD, compression)
        past = None if cache is None else cache.concept_lengths
        concepts = map_concepts(
            boundaries, kinds, layout, self.chunk_config.concept_positions, past
        )
        if self.chunk_config.router == "none":  # every token is its own concept, whatever the merge
            return boundaries, concepts, h_TD
        if state is None:
            c_MD, _ = merge_tokens(h_TD, concepts, self.chunk_config.merge)
            return boundaries, concepts, c_MD
        if boundaries.key_TD is not None:
            state.last_key_GD = _last_of_documents(boundaries.key_TD, layout, state.last_key_GD)
        open_chunks = state.open_chunks
        if open_chunks is None and self.chunk_config.merge != "boundary":
            open_chunks = _nothing_open(h_TD, len(layout.lengths))
        c_MD, state.open_chunks = merge_tokens(h_TD, concepts, self.chunk_config.merge, open_chunks)
        return boundaries, concepts, c_MD

    def _concept_model(
        self, c_MC: Tensor, concepts: ConceptMap, cache: ConceptCache | None, statistics: bool
    ) -> tuple[Tensor, list[RouterStatistics]]:
        if concepts.count == 0:  # decoding: no row closed a concept in this step
            return c_MC, []
        return self.concept(c_MC, concepts.layout, None, cache and cache.concept, statistics)

    def _dechunk(
        self,
        h_TD: Tensor,
        c_MC: Tensor,
        changed_MC: Tensor,
        boundaries: Boundaries,
        concepts: ConceptMap,
        cache: ConceptCache | None,
    ) -> Dechunked:
        """Eq. 5 and 6."""
        chunk = self.chunk_config
        joint = chunk.joint_decoding_layers > 0
        if chunk.concept_residual == "delta":
            if chunk.router == "none" and not joint and c_MC.shape[1] == h_TD.shape[1]:
                # h + (C(h) - h), without its rounding: the plain model, operation by operation.
                return Dechunked(changed_MC, changed_MC, concepts.read_T, None)
            values = self.from_concept(changed_MC - c_MC)
            if chunk.router == "none" and not joint:
                return Dechunked(h_TD + values, values, concepts.read_T, None)
            if joint:
                values = torch.cat((self.from_concept(changed_MC), values), dim=1)
        else:
            values = self.from_concept(changed_MC)
        p_M = boundaries.probability_T[concepts.boundary_M]
        if not chunk.ema:
            p_M = torch.ones_like(p_M)
        carried = None
        if cache is not None:
            carried = cache.chunk.smoothed_GD
            if carried is None:
                carried = values.new_zeros(concepts.carried, values.shape[1], dtype=torch.float32)
        deterministic = not self.training or chunk.noise == "none"
        smoothed = smooth(values, p_M, concepts, carried, doublings_for(concepts, deterministic))
        new_MD, read_T = smoothed[concepts.carried :], concepts.read_T
        if cache is not None and concepts.is_full_step:
            # Each row's token reads the row's last concept: one gather serves all that follows.
            smoothed, read_T = smoothed.index_select(0, concepts.read_T), None
            cache.chunk.smoothed_GD = smoothed
        elif cache is not None:
            cache.chunk.smoothed_GD = _last_of_documents(new_MD, concepts.layout, carried)
        smoothed = smoothed.to(h_TD.dtype)
        width = h_TD.shape[1]
        concept_XD, u_XD = smoothed[:, :width], smoothed[:, -width:]
        z_TD = plug_back(h_TD, u_XD, boundaries, concepts, gathered=read_T is None)
        return Dechunked(z_TD, concept_XD, read_T, new_MD)


@dataclasses.dataclass(frozen=True)
class Dechunked:
    """What the decoder reads.

    Attributes:
        z_TD: eq. 6. concept_XD: smoothed concepts for joint decoding. read_T: `[T]` which of them
            each token reads; None: token n reads entry n.
        smoothed_MD: the new smoothed concepts; None where nothing is smoothed.
    """

    z_TD: Tensor
    concept_XD: Tensor
    read_T: Tensor | None
    smoothed_MD: Tensor | None


def _nothing_open(h_TD: Tensor, documents: int) -> OpenChunks:
    sums = h_TD.new_zeros(documents, h_TD.shape[1], dtype=torch.float32)
    return OpenChunks(sums, sums[:, 0].clone())


def _last_of_documents(x_TD: Tensor, layout: PackedLayout, before_GD: Tensor | None) -> Tensor:
    """`[G, D]`: last entry of each document, or what it carried where nothing is new."""
    if x_TD.shape[0] == 0:
        return before_GD
    if layout.is_full_step:
        return x_TD
    lengths = torch.tensor(layout.lengths, device=x_TD.device)
    last = x_TD[(layout.cu_seqlens[1:].long() - 1).clamp(min=0)]
    return last if before_GD is None else torch.where(lengths[:, None] > 0, last, before_GD)
