"""Evaluation: lines of a dataset to prompts and references, answers to scores. Pure: no files, no network.

1. `items.read_item` makes prompt, reference and metadata of a line; `selection.select` chooses the lines
2. `slices.read_slices` and `read_clusters` name the parts of the set, `leaks.leaked_lines` the rows seen in training
3. `graders.read_graders` compiles graders, and each scores a written answer from 0 to 1; `likelihoods` has those that
   compare how likely a model finds given answers
The verdict on these scores is in `tuneship/gates/evaluation/verdict.py`.
"""
