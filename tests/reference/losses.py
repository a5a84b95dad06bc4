"""Ratio, balance, router z and language losses as plain sums (paper eq. 4, DESIGN sections 3.5 and
3.6).
"""

from __future__ import annotations

import torch
from torch import Tensor


def ratio_term(prob: Tensor, boundary: list, target: float) -> Tensor:
    """Eq. 4 over the given tokens: prob [N], N booleans. F carries no gradient."""
    g = sum(prob) / len(boundary)
    f = sum(1.0 for b in boundary if b) / len(boundary)
    return target * f * g + target / (target - 1) * (1 - f) * (1 - g)


def ratio_loss(
    prob_docs: list,
    boundary_docs: list,
    image_docs: list,
    scope: str,
    target: float,
    image_target: float | None = None,
    text_target: float | None = None,
) -> Tensor:
    """Ratio loss of several documents: lists of prob [N_g], of N_g booleans, of N_g "is a patch"
    flags.
    """
    if scope == "sample":
        terms = [ratio_term(p, b, target) for p, b in zip(prob_docs, boundary_docs, strict=True)]
        return sum(terms) / len(terms)
    prob = torch.cat(prob_docs)
    boundary = [b for doc in boundary_docs for b in doc]
    image = [i for doc in image_docs for i in doc]
    if scope == "global":
        return ratio_term(prob, boundary, target)
    total = 0.0
    for wanted, own in ((True, image_target), (False, text_target)):
        chosen = [n for n in range(len(image)) if bool(image[n]) is wanted]
        if chosen:
            term = ratio_term(prob[chosen], [boundary[n] for n in chosen], own or target)
            total = total + len(chosen) / len(image) * term
    return total


def ratio_loss_of_drawn(
    prob_docs: list, boundary_docs: list, image_docs: list, drawn: list, by_modality: bool
) -> Tensor:
    """Ratio loss when every document has its own ratio: eq. 4 over the documents of each ratio (and
    each modality), averaged by their tokens; a ratio of 1 asks for nothing.
    """
    total, tokens = 0.0, 0
    for ratio in sorted(set(drawn)):
        for modality in (False, True) if by_modality else (None,):
            prob, boundary = [], []
            for g, own in enumerate(drawn):
                for n in range(len(boundary_docs[g])):
                    if own == ratio and modality in (None, bool(image_docs[g][n])):
                        prob.append(prob_docs[g][n])
                        boundary.append(boundary_docs[g][n])
            if ratio != 1 and prob:
                total = total + len(prob) * ratio_term(torch.stack(prob), boundary, ratio)
                tokens += len(prob)
    return total / max(tokens, 1)


def balance_loss(layers: list) -> Tensor:
    """Mean over layers of E * sum_e share_e * mean probability_e; layers of (probabilities [T, E],
    chosen [T][K]).
    """
    terms = []
    for probabilities, chosen in layers:
        tokens, experts = probabilities.shape
        slots = sum(len(row) for row in chosen)
        term = 0.0
        for e in range(experts):
            share = sum(1 for row in chosen for x in row if x == e) / slots
            term = term + share * probabilities[:, e].sum() / tokens
        terms.append(experts * term)
    return sum(terms) / len(terms)


def router_z_loss(layers: list) -> Tensor:
    """Mean over layers of the mean over tokens of logsumexp(router logits)^2; layers of logits [T,
    E].
    """
    terms = []
    for logits in layers:
        total = 0.0
        for row in logits:
            total = total + torch.log(torch.exp(row).sum()) ** 2
        terms.append(total / len(logits))
    return sum(terms) / len(terms)


def token_losses(logits: Tensor, input_labels: list) -> list:
    """Cross entropies of one document: logits [N, V], labels at their own token (-100:
    unsupervised).

    Token t is predicted from t - 1, so the first one never counts. Returns (t, loss) pairs.
    """
    found = []
    for t in range(1, len(input_labels)):
        if input_labels[t] == -100:
            continue
        row = logits[t - 1]
        top = row.max().detach()
        log_sum = top + torch.log(torch.exp(row - top).sum())
        found.append((t, log_sum - row[input_labels[t]]))
    return found
