"""Evaluation: `python -m eval --model DIR --tasks easy_vqa`. See docs/evaluation.md.

- `tasks`: what is asked, how an answer is read and scored; one small description a task.
- `described`: tasks from YAML files.
- `records`: conversations of shards, cut into questions that are asked alone.
- `program`: one evaluation from arguments to files; `processes`: several processes of one.
- `runner`: asks in batches and counts tokens and concepts; `replies`: what was asked already.
- `statistics`: intervals and paired differences; `compare`: which differences are real.
- `report`: the table, `results.json` and `samples.jsonl`.
"""
