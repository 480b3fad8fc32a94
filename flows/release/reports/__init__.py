"""Shows a release to people: the report with its pictures, the page of a training, trackers."""
