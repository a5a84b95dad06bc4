"""Evaluation: `python -m eval --model DIR --tasks easy_vqa`. See docs/evaluation.md.

- `tasks`: what is asked, how an answer is read and scored; one small description a task.
- `records`: conversations of shards, cut into questions that are asked alone.
- `runner`: asks in batches, measures the compression ratio on the way.
- `report`: accuracy with intervals, the table, `results.json` and `samples.jsonl`.
"""
