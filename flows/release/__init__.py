"""What `flows/tune_and_deploy.py` and `flows/retrain.py` are made of."""
