"""Writes a training and its release into the trackers that people look at: MLflow, TensorBoard, Weights & Biases.

`job_facts.py` reads what is written from the service, `tracker.py` names the trackers, `outside.py` runs them in
processes of their own, so that one that hangs costs a release no more than its time limit. Ids, digests and numbers
only, never text of a dataset.
"""
