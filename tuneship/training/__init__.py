"""Trains adapters: dataset files and a spec in, an adapter and progress lines out. Knows no HTTP and no database.

`spec.py` is the work of a process, `__main__.py` the process, `training_loop.py` the loop, and `objective.py` the
training method (rows of an example, loss, measures). Below them: `data_files.py` and `tokenized_examples.py` (text to
tokens), `batches.py` (order), `micro_batches.py` (memory), `schedule.py` (learning rate, evaluations), `learner.py`
(model and optimizer), `packing.py` and `lora.py` (its fast paths), `distributed.py` and `worker_rank.py` (several
devices), `checkpoints.py` (what survives a kill), `progress_file.py` (what the supervisor reads). `spec.py`,
`progress_file.py` and this file load no torch.
"""
