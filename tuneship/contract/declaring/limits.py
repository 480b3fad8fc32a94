"""Limits that several parts of the product keep."""

# The largest rank of an adapter, trained here or elsewhere: all adapters of a base model share memory of this rank.
MAX_LORA_RANK = 512
