"""What people see of a release: the report, its pictures, the page of a training, trackers."""
