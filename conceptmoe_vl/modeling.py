"""The whole model: vision tower, projector and ConceptMoE language model, as a transformers model.

Inputs come padded `[B, N]` with an attention mask, or packed `[T]` with `cu_seqlens`. Padding ends
here: everything inside sees one packed stream, so padding can enter no attention, statistic or
loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init

from conceptmoe_vl.cache import ConceptCache
from conceptmoe_vl.compression import Dial
from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.experts import Experts
from conceptmoe_vl.generation import ConceptMoEGenerationMixin
from conceptmoe_vl.interleave import token_kinds
from conceptmoe_vl.language_model import ConceptMoELanguageModel, LanguageModelOutput
from conceptmoe_vl.layers import RMSNorm, Stack
from conceptmoe_vl.layout import PackedLayout
from conceptmoe_vl.losses import auxiliary_losses, chunked_cross_entropy
from conceptmoe_vl.moe import Router
from conceptmoe_vl.outputs import ChunkOutput, ConceptMoEVLOutput
from conceptmoe_vl.packed_inputs import PackedInputs
from conceptmoe_vl.products import FEW_ROWS, compute_dtype, few_rows_product
from conceptmoe_vl.vision import VisionTower, build_projector

# What transformers' own callers hand to every model and this one has no use for.
_HARMLESS = frozenset(
    ("return_dict", "output_attentions", "output_hidden_states", "cache_position", "synced_gpus")
)


class LanguageModelHead(nn.Linear):
    """The head: logits, or the chunked loss against targets.

    The loss is part of the module's forward so that ZeRO-3 gathers the weight for it.
    """

    def forward(self, h_SD: Tensor, target_S: Tensor | None = None) -> Any:
        if target_S is None:
            rows = h_SD.numel() // h_SD.shape[-1]
            few = 0 < rows <= FEW_ROWS and h_SD.device.type == "cpu" and not torch.is_grad_enabled()
            if few and compute_dtype(h_SD) == h_SD.dtype == self.weight.dtype == torch.float32:
                product = few_rows_product(h_SD.reshape(rows, -1).contiguous(), self.weight)
                return product.T.contiguous().view(*h_SD.shape[:-1], -1)
            return super().forward(h_SD)
        return chunked_cross_entropy(h_SD, self.weight, target_S)


class ConceptMoEVLPreTrainedModel(PreTrainedModel):
    """Weights' start, loading and saving.

    | part | start |
    | --- | --- |
    | linear layers, embeddings, experts, routers | normal, standard deviation `initializer_range` |
    | joint decoding W^c | zeros (eq. 7 starts as the plain layer) |
    | chunk projections | identity, or normal with 1/sqrt(d) |
    | vision tower | timm's own |
    """

    config_class = ConceptMoEVLConfig
    input_modalities = ("image", "text")
    supports_gradient_checkpointing = True
    _no_split_modules = ["Layer", "VisionTower"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = False
    _can_compile_fullgraph = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.text.initializer_range
        if isinstance(module, Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, Dial):
            if module.ratios:
                init.zeros_(module.shift)
        elif isinstance(module, Router):
            init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, nn.Linear):
            # transformers asks own code only about modules that hold parameters themselves, so what
            # the chunk module and joint decoding want is written on their projections.
            start = getattr(module, "start", std)
            if start == "identity":
                init.eye_(module.weight)
            else:
                init.normal_(module.weight, mean=0.0, std=start)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    def _set_gradient_checkpointing(self, enable: bool = True, **_: Any) -> None:
        for module in self.modules():
            if isinstance(module, Stack):
                module.gradient_checkpointing = enable
            elif isinstance(module, VisionTower):
                module.model.set_grad_checkpointing(enable)


class ConceptMoEVLForConditionalGeneration(
    ConceptMoEVLPreTrainedModel, ConceptMoEGenerationMixin, GenerationMixin
):
    """A vision-language model whose deep layers run on concepts instead of tokens.

    Args:
        config: all three sections; `config.vision` None makes a text-only model.
    """

    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ConceptMoEVLConfig) -> None:
        super().__init__(config)
        text, vision = config.text, config.vision
        self.embed_tokens = nn.Embedding(text.vocab_size, text.hidden_size)
        if vision is not None:
            if config.image_token_id is None:
                raise ValueError(
                    "a model with vision needs config.image_token_id; take it from the tokenizer"
                )
            self.vision = VisionTower(vision)
            self.projector = build_projector(vision, self.vision.width, text.hidden_size)
        self.language_model = ConceptMoELanguageModel(text, config.chunk)
        self.lm_head = LanguageModelHead(text.hidden_size, text.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embed_tokens = value

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_hw: Tensor | None = None,
        patch_coord: Tensor | None = None,
        patch_valid: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        cache: ConceptCache | None = None,
        past_key_values: ConceptCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_logits: bool | None = None,
        return_states: bool = False,
        return_losses: bool = True,
        compression: float | None = None,
        filler: bool = False,
        **unused: Any,
    ) -> ConceptMoEVLOutput:
        """Runs the model on padded or packed inputs.

        Args:
            input_ids: `[B, N]` ids, or `[T]` with `cu_seqlens` `[G + 1]`.
            attention_mask: `[B, N]`, 0 for padding on either side; with a cache it may cover the
                past too.
            pixel_values: `[I, 3, S, S]`, or patches `[I, P, patch * patch * 3]` with `patch_coord`
                `[I, P, 2]` and `patch_valid` `[I, P]` for native aspect. Images in reading order.
            image_grid_hw: `[I, 2]` rows and columns of each image's tokens. Under tiles an image is
                a plane: a thumbnail of one square, or a picture of several.
            labels: like `input_ids`, the token itself where it is supervised and -100 elsewhere.
            num_items_in_batch: what the summed language loss is divided by; None: supervised tokens
                here.
            cache, past_key_values: the cache, under its new and its old name in transformers.
            logits_to_keep: last columns of each row that get logits; 0: all.
            return_logits: whether logits are made; None: unless training with labels.
            return_states: whether the states that the head reads are given out.
            return_losses: False leaves auxiliary losses and statistics out, as a decoding step
                always does, where neither labels are given nor a gradient is wanted.
            compression: wanted tokens per concept of this call; None: what the model was trained
                for.
            filler: the batch only keeps this rank in step with others: it enters no statistic of
                the auxiliary losses. It has no labels to supervise.

        Raises:
            ValueError: shapes or images do not fit, with both numbers and the remedy; or the
                wanted compression cannot be reached.
            TypeError: an argument is unknown.
        """
        if not _HARMLESS.issuperset(unused):
            names = ", ".join(sorted(set(unused) - _HARMLESS))
            raise TypeError(f"forward takes no argument {names}; its docstring lists what it takes")
        cache = cache if cache is not None else past_key_values
        if use_cache and cache is None:
            cache = ConceptCache(self.config)
        packed = PackedInputs(input_ids, attention_mask, cu_seqlens, cache)
        grids = [] if image_grid_hw is None else image_grid_hw.tolist()
        kinds = token_kinds(packed.ids_T, packed.layout, self.config, grids)
        x_TD = self.embed_tokens(packed.ids_T)
        x_TD = self._place_images(
            x_TD, kinds.image_T, pixel_values, grids, patch_coord, patch_valid
        )
        # Nobody reads the losses of a decoding step; they would take a fifth of its time.
        step = cache is not None and packed.layout.max_length == 1 and packed.layout.has_past
        unread = step or not return_losses
        statistics = not unread or labels is not None or torch.is_grad_enabled()
        states = self.language_model(x_TD, packed.layout, kinds, cache, compression, statistics)
        forced_T = kinds.forced_T
        if self.config.chunk.router == "none":
            forced_T = torch.ones_like(forced_T)
        chunks = _chunk_output(states, packed.layout, forced_T)
        output = ConceptMoEVLOutput(cache=cache, chunks=chunks)
        if return_states:
            output.states = states.hidden_TD
        if statistics:
            self._add_losses(
                output, states, packed, kinds.image_T, labels, num_items_in_batch, filler
            )
        wanted = (
            return_logits
            if return_logits is not None
            else not (self.training and labels is not None)
        )
        if wanted:
            output.logits = packed.unpack(self.lm_head, states.hidden_TD, logits_to_keep)
        return output

    def _place_images(
        self,
        x_TD: Tensor,
        image_T: Tensor,
        pixel_values: Tensor | None,
        grids: list[list[int]],
        patch_coord: Tensor | None,
        patch_valid: Tensor | None,
    ) -> Tensor:
        """Puts projected image tokens at their placeholders."""
        if self.config.vision is None:
            if pixel_values is not None:
                raise ValueError(
                    "pixel_values were given, but this model is text-only (vision: null)"
                )
            return x_TD
        if pixel_values is None or not grids:
            if grids or pixel_values is not None:
                raise ValueError(
                    "pixel_values and image_grid_hw belong together; "
                    "build inputs with the processor"
                )
            return x_TD + self._absent_images() if self._must_run_vision(x_TD) else x_TD
        features_PD = self.projector(self.vision(pixel_values, grids, patch_coord, patch_valid))
        where = image_T.nonzero().squeeze(1)
        return x_TD.index_copy(0, where, features_PD.to(x_TD.dtype))

    def _must_run_vision(self, x_TD: Tensor) -> bool:
        """Whether a batch without images runs the vision path on a minimal one.

        It must where another rank may run it now, because collectives have to match; and where
        nothing but the vision path may be trained, because a loss without gradient has no backward.
        """
        path = (*self.vision.parameters(), *self.projector.parameters())
        learns = self.training and torch.is_grad_enabled()
        if learns and not x_TD.requires_grad and any(p.requires_grad for p in path):
            return True
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return False
        partitioned = hasattr(path[0], "ds_id")
        return self.training or partitioned

    def _absent_images(self) -> Tensor:
        """Zero, with a zero gradient for every parameter of the vision path.

        One minimal image times 0.
        """
        vision, edge = self.config.vision, self.config.vision.downsample
        parameter = next(self.projector.parameters())
        if vision.size_policy == "native":
            count = edge * edge
            coord = torch.cartesian_prod(torch.arange(edge), torch.arange(edge)).view(1, count, 2)
            pixels = parameter.new_zeros(1, count, self.vision.patch_size**2 * 3)
            valid = torch.ones(1, count, dtype=torch.bool, device=parameter.device)
            features = self.vision(pixels, [[1, 1]], coord.to(parameter.device), valid)
        else:
            pixels = parameter.new_zeros(1, 3, vision.image_size, vision.image_size)
            features = self.vision(pixels, [[self.vision.side, self.vision.side]])
        return self.projector(features).sum() * 0.0

    def _add_losses(
        self,
        output: ConceptMoEVLOutput,
        states: LanguageModelOutput,
        packed: PackedInputs,
        image_T: Tensor,
        labels: Tensor | None,
        num_items_in_batch: Tensor | float | None,
        filler: bool,
    ) -> None:
        """Fills in every loss and the statistics; the total only with labels."""
        text, chunk = self.config.text, self.config.chunk
        values = self.language_model.chunk.values
        routers = [statistics for stage in states.routers.values() for statistics in stage]
        losses = auxiliary_losses(
            chunk,
            states.boundaries,
            image_T,
            packed.layout,
            routers,
            across_ranks=self.training,
            filler=filler,
            values=values,
        )
        assert output.chunks is not None
        output.chunks.ratio = losses.tokens_per_concept
        output.chunks.ratio_by_modality = losses.ratio_by_modality
        output.chunks.ratio_by_target = losses.ratio_by_target
        output.expert_load = _by_stage(losses.load_LE, states.routers)
        output.router_entropy = _by_stage(losses.entropy_L, states.routers)
        output.ratio_loss, output.balance_loss = losses.ratio, losses.balance
        output.router_z_loss = losses.router_z
        if labels is None:
            return
        positions_S, target_S = packed.supervised(labels)
        total, each = self.lm_head(states.hidden_TD.index_select(0, positions_S - 1), target_S)
        divisor = max(len(target_S), 1) if num_items_in_batch is None else num_items_in_batch
        output.lm_loss = total / divisor
        output.lm_loss_per_token, output.supervised_positions = each, positions_S
        output.loss = (
            output.lm_loss
            + values.ratio_loss_weight * output.ratio_loss
            + text.balance_loss_weight * output.balance_loss
            + text.router_z_loss_weight * output.router_z_loss
        )


def _by_stage(each_L: Iterable[Tensor], routers: Mapping[str, Sequence[Any]]) -> dict[str, Tensor]:
    """Values of the executed MoE layers, stacked by the stages that have any."""
    each = iter(each_L)
    return {
        stage: torch.stack([next(each) for _ in layers])
        for stage, layers in routers.items()
        if layers
    }


def _chunk_output(
    states: LanguageModelOutput, layout: PackedLayout, forced_T: Tensor
) -> ChunkOutput:
    carried = states.concepts.carried
    read_T = states.concepts.read_T - carried if carried else states.concepts.read_T
    return ChunkOutput(
        boundary_prob=states.boundaries.probability_T,
        boundary_mask=states.boundaries.mask_T,
        boundary_forced=forced_T,
        concept_index=read_T.clamp(min=-1),
        cu_seqlens=layout.cu_seqlens,
    )
