"""Answers the requests of batches in the background, after all other requests, through the handlers of OpenAI's API."""
