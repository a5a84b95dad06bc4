"""Slow, obvious float64 references: plain loops written from the formulas of the paper.

Notable:
- a document at a time, a token at a time; nothing is batched, packed, cached or fused;
- inputs are float64 tensors, so that `torch.autograd` gives reference gradients too;
- only `forward.py` knows the parameter names of the real model.
"""
