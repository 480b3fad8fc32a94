"""Answers requests without a waiting caller, after all other requests; independent of files and of the requests'
source.
"""
