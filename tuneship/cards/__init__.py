"""Model cards: facts of the service and of the pipeline, and people's statements, as JSON and Markdown. Pure.

1. `facts.py` reads facts from the API's replies
2. `mapping.py` says which field states which attribute of HTI-1 and of CHAI; `making.py` counts them
3. `canonical.py` makes the bytes that are hashed, `rendering.py` the Markdown
"""
