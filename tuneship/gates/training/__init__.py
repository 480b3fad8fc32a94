"""Gates on a training: losses, divergence, and losses by row."""
