"""A service with the console, and browsers that are signed in to it."""
