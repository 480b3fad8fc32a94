"""Engines and trainings on other machines: agents, the connections to them, and their replicas as one group."""
