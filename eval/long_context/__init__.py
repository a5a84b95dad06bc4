"""Long context: `python -m eval long` and `python -m eval perplexity`. See docs/evaluation.md.

- `keys`: what is hidden: random numbers, codes and names; how they are found in an answer; scores.
- `haystack`: what it is hidden in; `prompt`: needles laid into it, cut to a length in tokens.
- `text_tasks`, `word_tasks`, `image_tasks`: one function a task, in the manner of RULER
  (arXiv 2404.06654) and of MM-NIAH (arXiv 2406.07230).
- `family`: the tasks over lengths, depths and samples, as the runner takes them.
- `summary`, `figures`: scores by length and depth, effective length, heat maps.
- `perplexity`: negative log-likelihood by position on long documents.
"""
