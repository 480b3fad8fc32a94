"""What releases and rollouts share: journal, approval, signals, errors."""
