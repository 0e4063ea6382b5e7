"""Demo runs, played by scripted policies: in memory, or written to any cluster for a measurement."""
