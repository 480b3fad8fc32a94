"""Contents of files: in a folder or in a bucket, sealed."""
