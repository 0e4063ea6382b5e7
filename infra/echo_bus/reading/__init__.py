"""Reading by position, up to the end or without end, and compacted topics as dictionaries."""
