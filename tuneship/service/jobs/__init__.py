"""Handlers of fine-tuning jobs, and the keeper that trains them in processes of their own."""
