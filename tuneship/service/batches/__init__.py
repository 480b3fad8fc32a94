"""OpenAI's batches: reads their lines as requests of the main API, and writes the answers as OpenAI's lines."""
