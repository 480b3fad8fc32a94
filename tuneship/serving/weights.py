"""The number formats in which the weights of a base model can be served. Loads no large library.

`int8` and `int4` are weight-only: activations, adapters and the KV cache stay in float32.
"""

FLOATS = ("float32", "bfloat16")
QUANTISED = ("int8", "int4")
# The fastest that keeps the loss of a fixed text, as measured on this machine (`weights_choice`).
AUTO = "auto"
WEIGHTS = (*FLOATS, *QUANTISED, AUTO)
