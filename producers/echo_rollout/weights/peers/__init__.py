"""Weights from other workers: each serves the verified chunks that it has, and asks its neighbours in the striped chains for the others."""
