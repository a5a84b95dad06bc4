"""What the chunking does: ratios, sizes, confidence, what is merged, what it costs."""
