"""Blobs: bytes too large for one record, in chunks, with checksums."""
