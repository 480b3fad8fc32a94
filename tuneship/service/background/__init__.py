"""Parts of the work that no request waits for: retries, repetition, its end, and the watch of the clock."""
