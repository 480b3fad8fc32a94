"""Handlers of fine-tuning jobs, and the runner that trains them in processes of their own."""
