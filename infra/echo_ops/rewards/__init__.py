"""Rewards of a run that is going: tried, attached, weighed, watched and compared."""
