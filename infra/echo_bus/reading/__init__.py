"""Reading by position: raw and decoded, to the end or on and on, and compacted topics as dictionaries."""
