"""Dataset files and a spec in, adapter and progress lines out. Knows no HTTP and no database.

`spec.py` what is asked, `__main__.py` the process, `run.py` the loop; under it `rows.py` (text to
tokens), `batches.py` (order), `learner.py` (model and loss), `lora.py` (the quick LoRA layer),
`checkpoints.py` (what survives a kill), `progress.py` (what the supervisor reads). Only `run.py`,
`learner.py` and `lora.py` load torch: this package's `__init__` and `spec.py` stay light.
"""
