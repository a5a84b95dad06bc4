"""From open checkpoints to ConceptMoE-VL and back: `conceptmoe-vl convert` and `export`.

Notable:
- weights are copied as bytes from shard to shard: no tensor of the source is ever loaded whole,
  and what is not computed anew is the source's to the last bit;
- everything that can be refused is refused before the first byte is written, and the result appears
  under its name only when it is complete.
"""
