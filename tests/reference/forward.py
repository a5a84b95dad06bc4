"""The whole model, document by document, from a real model's weights and configuration, in
float64.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tests.reference import chunking, losses, transformer


@dataclasses.dataclass
class DocumentResult:
    """What the reference computes for one document of N tokens.

    `logits` [N, V], `prob` [N], `boundary` N booleans, `of_token` psi(n), `positions` of the
    concepts, and `routers`: (logits [T, E], probabilities [T, E], chosen [T][K]) of every executed
    MoE layer.
    """

    logits: Tensor
    prob: Tensor
    boundary: list
    of_token: list
    positions: list
    routers: list


class ReferenceModel:
    """Float64 copies of a model's parameters, as autograd leaves, and the forward pass by loops."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.config = model.config
        self.leaf = {
            name: parameter.detach().double().requires_grad_()
            for name, parameter in model.named_parameters()
        }
        self.tied = model.config.text.tie_word_embeddings

    def weight(self, name: str) -> Tensor:
        return self.leaf[f"language_model.{name}"]

    def embed(self, document, image_embeddings: list) -> Tensor:
        """[N, D]: rows of the embedding, image tokens replaced by their embeddings in raster
        order.
        """
        table = self.leaf["embed_tokens.weight"]
        rows = [table[i] for i in document.ids]
        for (first, height, width), embedding in zip(document.grids, image_embeddings, strict=True):
            for patch in range(height * width):
                rows[first + patch] = embedding[patch]
        return torch.stack(rows)

    def layer(
        self, name: str, x: Tensor, positions: list, top_k: int, joint: Tensor | None, routers: list
    ):
        text = self.config.text
        eps = text.rms_norm_eps
        y = transformer.rms_norm(x, self.weight(f"{name}.input_layernorm.weight"), eps)
        projected = []
        for kind in "qkv":
            value = y @ self.weight(f"{name}.self_attn.{kind}_proj.weight").T
            if text.attention_bias != "none":
                value = value + self.weight(f"{name}.self_attn.{kind}_proj.bias")
            if joint is not None:
                c = transformer.rms_norm(
                    joint, self.weight(f"{name}.self_attn.joint.norm.weight"), eps
                )
                value = value + c @ self.weight(f"{name}.self_attn.joint.{kind}_proj.weight").T
            projected.append(value.unflatten(1, (-1, text.head_dim)))
        norms = (None, None)
        if text.qk_norm:
            norms = [self.weight(f"{name}.self_attn.{kind}_norm.weight") for kind in "qk"]
        if text.qk_norm and text.qk_norm_over == "all_heads":
            for i in range(2):
                projected[i] = transformer.norm_of_all_heads(projected[i], norms[i], eps)
            norms = (None, None)
        mixed = transformer.causal_attention(*projected, positions, text.rope_theta, *norms, eps)
        x = x + mixed.flatten(1) @ self.weight(f"{name}.self_attn.o_proj.weight").T
        if text.attention_bias == "all":
            x = x + self.weight(f"{name}.self_attn.o_proj.bias")
        y = transformer.rms_norm(x, self.weight(f"{name}.post_attention_layernorm.weight"), eps)
        gate_up = self.weight(f"{name}.mlp.experts.gate_up_proj")
        down = self.weight(f"{name}.mlp.experts.down_proj")
        f = gate_up.shape[1] // 2
        experts = [(gate_up[e, :f], gate_up[e, f:], down[e]) for e in range(gate_up.shape[0])]
        shared = None
        if text.num_shared_experts:
            shared = tuple(
                self.weight(f"{name}.mlp.shared.{k}_proj.weight") for k in ("gate", "up", "down")
            )
        shared_gate = None
        if text.shared_expert_gate:
            shared_gate = self.weight(f"{name}.mlp.shared_gate.weight")[0]
        gate = self.weight(f"{name}.mlp.gate.weight")
        out, *statistics = transformer.moe_block(
            y, gate, experts, top_k, text.norm_topk_prob, shared, shared_gate
        )
        routers.append(tuple(statistics))
        return x + out

    def forward(
        self, document, image_embeddings: list = (), boundary: list | None = None
    ) -> DocumentResult:
        """One document; `boundary` overrides the decisions (training noise)."""
        text, chunk = self.config.text, self.config.chunk
        grid_mode = chunk.image_mode == "grid"
        kinds, grids = document.kinds, document.grids
        routers: list = []
        token_positions = list(range(len(kinds)))

        h = self.embed(document, image_embeddings)
        for i in range(text.encoder_layers):
            h = self.layer(
                f"encoder.layers.{i}", h, token_positions, text.num_experts_per_tok, None, routers
            )

        found = self.boundaries(h, kinds, grids, grid_mode)
        decided = chunking.decide(found.prob) if boundary is None else boundary
        concepts = chunking.find_concepts(decided, kinds, found.parent, grid_mode=grid_mode)
        c = chunking.merge_tokens(h, concepts, chunk.merge)

        changed, change = self.concept_model(c, concepts.position, routers)
        before = chunking.predecessors(concepts, kinds, found.parent, grid_mode=grid_mode)
        p = (
            found.prob[concepts.position]
            if chunk.ema
            else torch.ones(len(before), dtype=torch.float64)
        )
        smoothed = chunking.smooth(changed, p, before)
        u = chunking.smooth(change, p, before) if chunk.concept_residual == "delta" else smoothed
        z = chunking.plug_back(h, found.prob, decided, u, concepts.of_token)

        joint = smoothed[concepts.of_token]
        for i in range(text.decoder_layers):
            reads = i >= text.decoder_layers - chunk.joint_decoding_layers
            z = self.layer(
                f"decoder.layers.{i}",
                z,
                token_positions,
                text.num_experts_per_tok,
                joint if reads else None,
                routers,
            )
        out = transformer.rms_norm(z, self.weight("norm.weight"), text.rms_norm_eps)
        head = self.leaf["embed_tokens.weight" if self.tied else "lm_head.weight"]
        return DocumentResult(
            out @ head.T, found.prob, decided, concepts.of_token, concepts.position, routers
        )

    def boundaries(self, h: Tensor, kinds: list, grids, grid_mode: bool) -> chunking.Boundaries:
        chunk, weights = self.config.chunk, {}
        if chunk.router == "cosine":
            weights = {
                "w_q": self.weight("chunk.q_proj.weight"),
                "w_k": self.weight("chunk.k_proj.weight"),
            }
        elif chunk.router == "linear":
            weights = {
                "w": self.weight("chunk.score.weight")[0],
                "bias": self.weight("chunk.score.bias"),
            }
        return chunking.find_boundaries(
            h,
            kinds,
            grids,
            chunk.router,
            grid_mode=grid_mode,
            neighborhood=chunk.neighborhood,
            target_ratio=chunk.target_ratio,
            **weights,
        )

    def concept_model(self, c: Tensor, positions: list, routers: list) -> tuple[Tensor, Tensor]:
        """W_out chat' and W_out (chat' - c'), both [M, D]."""
        text, chunk = self.config.text, self.config.chunk
        if chunk.concept_positions == "index":
            positions = list(range(len(positions)))
        wider = text.width_of_concepts != text.hidden_size
        before = c @ self.weight("to_concept.weight").T if wider else c
        x = before
        for i in text.concept_schedule:
            x = self.layer(
                f"concept.layers.{i}", x, positions, text.experts_per_concept, None, routers
            )
        changed, change = x, x - before
        if wider:
            out = self.weight("from_concept.weight").T
            changed, change = changed @ out, change @ out
        return changed, change


def reference_losses(
    model: ReferenceModel, results: list, documents: list, labels: list
) -> dict[str, Tensor]:
    """Every loss of a batch of documents, by the names of the model's output; `labels` lists of
    ids.
    """
    text, chunk = model.config.text, model.config.chunk
    tokens = [
        pair[1]
        for result, own in zip(results, labels, strict=True)
        for pair in losses.token_losses(result.logits, own)
    ]
    zero = results[0].logits.new_zeros(())
    ratio = zero
    if chunk.router != "none":
        ratio = losses.ratio_loss(
            [r.prob for r in results],
            [r.boundary for r in results],
            [[kind == "patch" for kind in d.kinds] for d in documents],
            chunk.ratio_scope,
            chunk.target_ratio,
            chunk.image_target_ratio,
            chunk.text_target_ratio,
        )
    per_layer = list(zip(*(r.routers for r in results), strict=True))
    gathered = [
        (
            torch.cat([logits for logits, _, _ in layer]),
            torch.cat([probabilities for _, probabilities, _ in layer]),
            [row for _, _, chosen in layer for row in chosen],
        )
        for layer in per_layer
    ]
    found = {
        "lm_loss": sum(tokens) / len(tokens) if tokens else zero,
        "ratio_loss": ratio,
        "balance_loss": losses.balance_loss([(p, chosen) for _, p, chosen in gathered]),
        "router_z_loss": losses.router_z_loss([logits for logits, _, _ in gathered]),
    }
    found["loss"] = (
        found["lm_loss"]
        + chunk.ratio_loss_weight * found["ratio_loss"]
        + text.balance_loss_weight * found["balance_loss"]
        + text.router_z_loss_weight * found["router_z_loss"]
    )
    return found
