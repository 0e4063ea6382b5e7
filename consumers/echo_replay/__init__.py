"""Reading what runs have left in the log: proof of what was promised, and training again from it."""
