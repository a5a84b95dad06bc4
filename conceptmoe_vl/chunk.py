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

from conceptmoe_vl.chunk_values import ChunkValues
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

    Attributes:
        schedule: what training has moved some values of `config` to; None: nothing.
    """

    def __init__(self, config: ChunkConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.schedule: ChunkValues | None = None
        if config.router == "cosine":
            self.q_proj = Linear(hidden_size, hidden_size, bias=False)
            self.k_proj = Linear(hidden_size, hidden_size, bias=False)
            for projection in (self.q_proj, self.k_proj):
                projection.start = "identity" if config.init == "identity" else hidden_size**-0.5
        elif config.router == "linear":
            self.score = Linear(hidden_size, 1)
        self.dial = Dial(config)

    @property
    def values(self) -> ChunkValues:
        """The values that hold now."""
        return self.schedule or ChunkValues.of(self.config)

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
        if compression is None and self.schedule is not None:
            budget = self.schedule.move(budget, self.config.router)
        patches = kinds.patches if self.config.image_mode == "grid" else None
        key_TD = self.k_proj(h_TD) if self.config.router == "cosine" else None
        pairs = None
        if key_TD is not None:
            pairs = _Cosines(self.q_proj(h_TD), key_TD, layout, last_key_GD)
        p_T = self._sequential_probability(h_TD, pairs, layout, budget.ratio)
        parent_P = None
        if patches is not None:
            p_P, parent_P = self._grid_probability(
                pairs or _Cosines(h_TD, h_TD, layout, None), patches
            )
            if self.config.router == "cosine":
                p_T = p_T.index_put((patches.token_P,), p_P)
        p_T = p_T.masked_fill(kinds.forced_T, 1.0)
        raw_T = p_T.detach()
        if budget.threshold_T is None:
            return Boundaries(p_T, self._decide(raw_T, raw_T >= THRESHOLD), parent_P, key_TD, raw_T)
        threshold_T = budget.threshold_T.to(p_T.device)
        p_T = recentre(p_T, threshold_T)
        mask_T = self._decide(p_T.detach(), raw_T >= threshold_T)
        return Boundaries(p_T, mask_T, parent_P, key_TD, raw_T, budget.target_G)

    def _sequential_probability(
        self, h_TD: Tensor, pairs: _Cosines | None, layout: PackedLayout, ratio: float
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
        assert pairs is not None  # the cosine router has made them
        return (0.5 - 0.5 * pairs.before_T).clamp(0.0, 1.0)

    def _grid_probability(self, pairs: _Cosines, patches: ImagePatches) -> tuple[Tensor, Tensor]:
        """p and the parent of every patch: the most similar earlier neighbour in the plane."""
        token, left_edge = patches.token_P, patches.column_P == 0
        up, top_edge = token - patches.columns_P, patches.row_P == 0
        neighbours = [(up, top_edge)]
        if self.config.neighborhood == 8:
            right_edge = patches.column_P == patches.columns_P - 1
            neighbours += [(up - 1, left_edge | top_edge), (up + 1, right_edge | top_edge)]
        indices, cosines = [token - 1], [pairs.before_T[token].masked_fill(left_edge, -2.0)]
        for where, missing in neighbours:
            where = torch.where(missing, token, where)
            indices.append(where)
            cosines.append(pairs.between(token, where).masked_fill(missing, -2.0))
        best_P, choice_P = torch.stack(cosines, 1).max(1)
        parent_P = torch.stack(indices, 1).gather(1, choice_P[:, None]).squeeze(1)
        # An image's first patch has no neighbour: its own parent.
        parent_P = torch.where(left_edge & top_edge, token, parent_P)
        return (0.5 - 0.5 * best_P).clamp(0.0, 1.0), parent_P

    def _decide(self, p_T: Tensor, reached_T: Tensor) -> Tensor:
        """b, section 3.1: what reached the threshold, or with the configured noise in training."""
        noise = (
            self.config.noise
            if self.training and self.config.router in ("cosine", "linear")
            else "none"
        )
        if noise == "bernoulli":
            return torch.rand_like(p_T) < sharpen(p_T, self.values.tau)
        if noise == "gaussian":
            noisy = p_T + self.config.sigma * torch.randn_like(p_T)
            return torch.where(p_T == 1.0, p_T, noisy) >= THRESHOLD
        return reached_T


def sharpen(p: Tensor, tau: float) -> Tensor:
    """p^sharp: p^(1/tau) where p is at least one half, else 1 - (1 - p)^(1/tau)."""
    return torch.where(p >= THRESHOLD, p ** (1 / tau), 1 - (1 - p) ** (1 / tau))


class _Cosines:
    """Cosines of the tokens' q and k in float32, each as a product over the two lengths.

    Args:
        q_TD, k_TD: projections of the T tokens. layout: documents.
        last_key_GD: key of the token before each document's first one here; None without a cache.

    Attributes:
        before_T: `[T]` cosine of each token with the one before it; the first token of a document
            without a past has no meaning there.
    """

    def __init__(
        self, q_TD: Tensor, k_TD: Tensor, layout: PackedLayout, last_key_GD: Tensor | None
    ) -> None:
        self._q_TD, self._k_TD = q_TD.float(), k_TD.float()
        self._q_T, self._k_T = _inverse_length(self._q_TD), _inverse_length(self._k_TD)
        products = (self._q_TD[1:] * self._k_TD[:-1]).sum(-1)
        self.before_T = F.pad(products * self._q_T[1:] * self._k_T[:-1], (1, 0))
        if last_key_GD is not None:
            starts = layout.starts
            last = last_key_GD[layout.document_T[starts]].float()
            cosines = (self._q_TD[starts] * last).sum(-1) * self._q_T[starts]
            self.before_T = self.before_T.index_put((starts,), cosines * _inverse_length(last))

    def between(self, current: Tensor, earlier: Tensor) -> Tensor:
        """`[P]` cosines of the q of some tokens with the k of others."""
        rows = self._q_TD.index_select(0, current) * self._k_TD.index_select(0, earlier)
        return rows.sum(-1) * self._q_T[current] * self._k_T[earlier]


def _inverse_length(x: Tensor) -> Tensor:
    return 1.0 / torch.linalg.vector_norm(x, dim=-1).clamp(min=1e-12)
