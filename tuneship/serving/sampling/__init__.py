"""The choice of the next token: sampling, log probabilities, and grammars that answers follow."""
