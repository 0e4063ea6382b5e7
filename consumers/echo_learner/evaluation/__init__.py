"""Evaluations: held-out prompts are requested for exactly one version, and the results are published."""
