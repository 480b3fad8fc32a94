"""Conversations as text and tokens: templates, tokenizers, tools, and the parity file."""
