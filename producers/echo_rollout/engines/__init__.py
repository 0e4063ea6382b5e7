"""Engines: tokens with log-probabilities under an exact version."""
