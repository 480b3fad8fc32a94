"""The parts of `flows/tune_and_deploy.py` and `flows/retrain.py`."""
