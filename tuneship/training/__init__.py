"""Dataset files and a spec in, adapter and progress lines out. Knows no HTTP and no database.

`spec.py` what is asked, `__main__.py` the process, `run.py` the loop; under it `tokenized_examples.py` (text to
tokens), `batches.py` (order), `schedule.py` (rate, when to measure), `learner.py` (model and loss), `packing.py` and
`lora.py` (its quick ways), `distributed.py` and `worker_rank.py` (several devices), `checkpoints.py` (what survives a
kill), `progress_file.py` (what the supervisor reads). `spec.py`, `progress_file.py` and this file load no torch.
"""
