"""OpenAI's API over the operations of this service: a mapping between two wires, without rules of its own."""
