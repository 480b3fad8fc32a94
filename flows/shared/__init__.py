"""Shared by releases and rollouts: journal, approval, signals, errors."""
