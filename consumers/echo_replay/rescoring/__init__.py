"""Another reward, or another version of one, for trajectories of the past."""

RESCORE = "rescore"
"""Who judged, in the records of a rescore."""
UNREPEATABLE = "rescore-unrepeatable"
"""The same, where the reward says that it cannot be repeated."""
