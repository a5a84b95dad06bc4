"""Padded or packed inputs of the model as one packed stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from conceptmoe_vl.cache import ConceptCache, check_cache
from conceptmoe_vl.layout import PackedLayout


class PackedInputs:
    """Padded or packed inputs as one packed stream, and the way back.

    Args:
        input_ids, attention_mask, cu_seqlens: as in `forward`.
        cache: its row lengths come before the new tokens.
    """

    def __init__(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: ConceptCache | None,
    ) -> None:
        if input_ids is None:
            raise ValueError("input_ids are needed: image placeholders are found by their ids")
        if (input_ids.dim() == 1) != (cu_seqlens is not None):
            raise ValueError(
                f"input_ids have shape {tuple(input_ids.shape)}: "
                "give [B, N] ids, or [T] ids with cu_seqlens"
            )
        self.kept_BN: Tensor | None = None
        check_cache(cache)
        self.padded = False
        if cu_seqlens is not None:
            if cache is not None:
                raise ValueError(
                    "a cache needs padded inputs [B, N]; packed documents cannot be continued"
                )
            self.ids_T = input_ids
            self.layout = PackedLayout.from_cu_seqlens(cu_seqlens, input_ids.shape[0])
        else:
            self._pack(input_ids, attention_mask, cache)
        if self.ids_T.numel() == 0:
            raise ValueError("the input holds no token; give at least one that is not padding")

    def _pack(
        self, input_ids: Tensor, attention_mask: Tensor | None, cache: ConceptCache | None
    ) -> None:
        rows, columns = input_ids.shape
        if cache is not None:
            cache.begin(rows)  # refuses another number of rows before their lengths are used
        past = None if cache is None else cache.token_lengths
        if attention_mask is None:
            kept = torch.ones_like(input_ids, dtype=torch.bool)
        elif attention_mask.dim() != 2 or attention_mask.shape[1] < columns:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, "
                f"input_ids {tuple(input_ids.shape)}; the mask must cover the inputs"
            )
        else:
            kept = attention_mask[:, -columns:].bool().to(input_ids.device)
        self.kept_BN = kept
        lengths = kept.sum(1).tolist() if attention_mask is not None else [columns] * rows
        self.padded = sum(lengths) != rows * columns
        self.ids_T = input_ids[kept] if self.padded else input_ids.flatten()
        numbers = tuple(range(rows)) if cache is not None else None
        if cache is not None:
            cache.columns_of_call = columns, kept if self.padded else None
        self.layout = PackedLayout.from_lengths(lengths, input_ids.device, past, rows=numbers)

    def supervised(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Stream indices of supervised tokens and their ids.

        A document's first token has no predictor.
        """
        labels_T = labels if self.kept_BN is None else labels[self.kept_BN]
        if labels_T.shape != self.ids_T.shape:
            raise ValueError(
                f"labels have {labels_T.numel()} entries, the inputs {self.ids_T.numel()} tokens"
            )
        first = torch.zeros_like(labels_T, dtype=torch.bool).index_fill(0, self.layout.starts, True)
        positions = ((labels_T != -100) & ~first).nonzero().squeeze(1)
        return positions, labels_T[positions]

    def unpack(self, head: nn.Module, hidden_TD: Tensor, logits_to_keep: int) -> Tensor:
        """Logits in the shape of the inputs; zeros at padding. Only kept columns are computed."""
        if self.kept_BN is None:
            return head(hidden_TD)
        rows, columns = self.kept_BN.shape
        wanted = self.kept_BN
        if not self.padded:
            keep = min(logits_to_keep or columns, columns)
            return head(hidden_TD.unflatten(0, (rows, columns))[:, columns - keep :])
        if logits_to_keep:
            columns = min(logits_to_keep, columns)
            wanted = wanted[:, -columns:]
            in_stream = torch.zeros_like(self.kept_BN)
            in_stream[:, -columns:] = wanted
            hidden_TD = hidden_TD[in_stream[self.kept_BN]]
        logits = head(hidden_TD)
        out = logits.new_zeros(rows, columns, logits.shape[-1])
        out[wanted] = logits
        return out
