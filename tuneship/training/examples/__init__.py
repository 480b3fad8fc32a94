"""Examples as rows of tokens: files, batches, packing, and the check of tokenizers."""
