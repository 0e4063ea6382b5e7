"""Held-out prompts under exactly one version: asked for, gathered, published."""
