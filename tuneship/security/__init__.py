"""All cryptography: sealed files, sealed values and the secrets derived from the master key."""
