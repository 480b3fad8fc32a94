"""Counts and notes about requests, made while they are answered."""
