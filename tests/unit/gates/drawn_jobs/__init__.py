"""Training jobs drawn from seeds, and how often the training gates are wrong about them."""
