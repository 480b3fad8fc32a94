"""tuneship: tune a language model on your data and ship it safely. Knows nothing of Prefect."""
