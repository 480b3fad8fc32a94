"""Token ids in, token ids out. Knows no HTTP and no database.

`line` is the gateway's end and never loads torch; `replica` is the process behind it: `engine` turns
`scheduler` -> `llama` (or `generic`) -> `sampler` once per token, over `cache` and `lora`.
"""
