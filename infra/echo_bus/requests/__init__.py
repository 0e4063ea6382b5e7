"""Requests: their workers, the partition of the next one, those that still matter, and replies."""
