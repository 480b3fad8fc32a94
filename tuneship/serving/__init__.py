"""Serving: token ids in, token ids out. Knows no HTTP and no database.

`replica_client` is the service's end of a replica and never loads torch. `replica` is the process behind it, whose
`engine` runs `scheduler`, `llama` (or `generic`) and `sampler` once per token, over the KV cache (`kv_cache`,
`kv_slots`; `attention` and `attention_masks` for what is computed over it) and the adapters (`lora`).
"""
