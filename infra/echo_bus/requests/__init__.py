"""Requests: who works on them, where the next one goes, which still matter, and replies."""
