"""The chunk module: which tokens close a concept (eq. 3), in reading order or in the image plane.

Notable:
- q projects the current token and k its predecessor (H-Net has the roles the other way round);
- the cosine is float32, p lies in [0, 1], and p = 1 is safe everywhere (no logarithm of 1 - p);
- in grid mode a patch is compared with its neighbours in the plane, never across a row's end.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conceptmoe_vl.compression import Dial, recentre
from conceptmoe_vl.configuration import ChunkConfig
from conceptmoe_vl.layout import PackedLayout
from conceptmoe_vl.products import Linear

# Where the decision falls without noise (eq. 3).
THRESHOLD = 0.5


@dataclasses.dataclass(frozen=True)
class ImagePatches:
    """Where the image tokens lie in a packed stream. All are `[P]` int64, images end to end.

    Attributes:
        token_P: index of the patch's token in the stream.
        row_P, column_P: its place in its image's grid. columns_P: the width of that grid.
        longest: patches of the largest image.
    """

    token_P: Tensor
    row_P: Tensor
    column_P: Tensor
    columns_P: Tensor
    longest: int


@dataclasses.dataclass(frozen=True)
class TokenKinds:
    """What the chunk module must know of each token beside its state.

    Attributes:
        image_T: `[T]` bool, image tokens. forced_T: `[T]` bool, boundaries that are set, not
            learned.
        patches: places in the plane, None where the stream holds no image.
    """

    image_T: Tensor
    forced_T: Tensor
    patches: ImagePatches | None


@dataclasses.dataclass(frozen=True)
class Boundaries:
    """The chunk module's decision.

    Attributes:
        probability_T: `[T]` float32 p_n, odds moved by the threshold. mask_T: `[T]` bool b_n.
        parent_P: `[P]` stream index of each patch's parent in grid mode (itself for an image's
            first patch); None in sequential mode or without images.
        key_TD: `[T, D]` projected keys (None for routers without keys): the cache keeps the last.
        raw_T: `[T]` detached p before the threshold moved it, forced ones 1: what calibration
            measures (None in boundaries made by hand).
        target_G: `[G]` ratio drawn for each document, an index into `chunk.target_ratios`.
    """

    probability_T: Tensor
    mask_T: Tensor
    parent_P: Tensor | None
    key_TD: Tensor | None
    raw_T: Tensor | None = None
    target_G: Tensor | None = None


class ChunkModule(nn.Module):
    """Boundary probabilities and decisions for every token.

    Args:
        config: the `chunk` section. hidden_size: D.
    """

    def __init__(self, config: ChunkConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        if config.router == "cosine":
            self.q_proj = Linear(hidden_size, hidden_size, bias=False)
            self.k_proj = Linear(hidden_size, hidden_size, bias=False)
            for projection in (self.q_proj, self.k_proj):
                projection.start = "identity" if config.init == "identity" else hidden_size**-0.5
        elif config.router == "linear":
            self.score = Linear(hidden_size, 1)
        self.dial = Dial(config)

    def forward(
        self,
        h_TD: Tensor,
        kinds: TokenKinds,
        layout: PackedLayout,
        last_key_GD: Tensor | None = None,
        compression: float | None = None,
    ) -> Boundaries:
        """Decides the boundaries of a packed stream.

        Args:
            h_TD: encoder states. kinds: modalities and forced boundaries. layout: documents.
            last_key_GD: key of the token before each document's first one here, for documents that
                continue from a cache.
            compression: wanted tokens per concept; None means what the model was trained for.

        Raises:
            ValueError: the model cannot reach the wanted compression.
        """
        budget = self.dial.budget(compression, kinds.image_T, layout, self.training)
        patches = kinds.patches if self.config.image_mode == "grid" else None
        unit_q, unit_k, key_TD = None, None, None
        if self.config.router == "cosine":
            key_TD = self.k_proj(h_TD)
            unit_q, unit_k = _unit(self.q_proj(h_TD)), _unit(key_TD)
        p_T = self._sequential_probability(h_TD, unit_q, unit_k, layout, last_key_GD, budget.ratio)
        parent_P = None
        if patches is not None:
            if unit_q is None or unit_k is None:
                unit_q = unit_k = _unit(h_TD)
            p_P, parent_P = self._grid_probability(unit_q, unit_k, patches)
            if self.config.router == "cosine":
                p_T = p_T.index_put((patches.token_P,), p_P)
        p_T = p_T.masked_fill(kinds.forced_T, 1.0)
        raw_T = p_T.detach()
        if budget.threshold_T is None:
            return Boundaries(p_T, self._decide(raw_T, raw_T >= THRESHOLD), parent_P, key_TD, raw_T)
        p_T = recentre(p_T, budget.threshold_T)
        mask_T = self._decide(p_T.detach(), raw_T >= budget.threshold_T)
        return Boundaries(p_T, mask_T, parent_P, key_TD, raw_T, budget.target_G)

    def _sequential_probability(
        self,
        h_TD: Tensor,
        unit_q: Tensor | None,
        unit_k: Tensor | None,
        layout: PackedLayout,
        last_key_GD: Tensor | None,
        ratio: float,
    ) -> Tensor:
        router = self.config.router
        if router == "none":
            return torch.ones(h_TD.shape[0], device=h_TD.device)
        if router == "linear":
            return self.score(h_TD).float().squeeze(-1).sigmoid()
        if router == "fixed":
            # The position in the document, not the rotary one: it counts tokens already cached too.
            n = layout.place_T.double()
            return ((n / ratio).floor() != ((n - 1) / ratio).floor()).float()
        # The cosine router has made them.
        assert unit_q is not None
        assert unit_k is not None
        before = unit_k.roll(1, 0)
        if last_key_GD is not None:
            before = before.index_put(
                (layout.starts,), _unit(last_key_GD[layout.document_T[layout.starts]])
            )
        return (0.5 - 0.5 * (unit_q * before).sum(-1)).clamp(0.0, 1.0)

    def _grid_probability(
        self, unit_q: Tensor, unit_k: Tensor, patches: ImagePatches
    ) -> tuple[Tensor, Tensor]:
        """p and the parent of every patch: the most similar earlier neighbour in the plane."""
        token, left_edge = patches.token_P, patches.column_P == 0
        up, top_edge = token - patches.columns_P, patches.row_P == 0
        neighbours = [(token - 1, left_edge), (up, top_edge)]
        if self.config.neighborhood == 8:
            right_edge = patches.column_P == patches.columns_P - 1
            neighbours += [(up - 1, left_edge | top_edge), (up + 1, right_edge | top_edge)]
        index_PX = torch.stack([where for where, _ in neighbours], 1)
        missing_PX = torch.stack([edge for _, edge in neighbours], 1)
        index_PX = torch.where(missing_PX, token[:, None], index_PX)
        cosines = [(unit_q[token] * unit_k[index_PX[:, x]]).sum(-1) for x in range(len(neighbours))]
        cosine_PX = torch.stack(cosines, 1).masked_fill(missing_PX, -2.0)
        best_P, choice_P = cosine_PX.max(1)
        parent_P = index_PX.gather(1, choice_P[:, None]).squeeze(1)
        return (0.5 - 0.5 * best_P).clamp(0.0, 1.0), parent_P

    def _decide(self, p_T: Tensor, reached_T: Tensor) -> Tensor:
        """b, section 3.1: what reached the threshold, or with the configured noise in training."""
        noise = (
            self.config.noise
            if self.training and self.config.router in ("cosine", "linear")
            else "none"
        )
        if noise == "bernoulli":
            return torch.rand_like(p_T) < sharpen(p_T, self.config.tau)
        if noise == "gaussian":
            noisy = p_T + self.config.sigma * torch.randn_like(p_T)
            return torch.where(p_T == 1.0, p_T, noisy) >= THRESHOLD
        return reached_T


def sharpen(p: Tensor, tau: float) -> Tensor:
    """p^sharp: p^(1/tau) where p is at least one half, else 1 - (1 - p)^(1/tau)."""
    return torch.where(p >= THRESHOLD, p ** (1 / tau), 1 - (1 - p) ** (1 / tau))


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x.float(), dim=-1)
