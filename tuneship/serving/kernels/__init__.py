"""Products of tokens with weights of 4 and 8 bits, by machine code made at the start."""
