"""Blobs: bytes larger than a record, in chunks, verified on the way."""
