"""Another reward, or another version of one, for trajectories of the past."""

RESCORE = "rescore"
"""The `application` in the records of a rescore."""
UNREPEATABLE = "rescore-unrepeatable"
"""The same for a reward that declares itself not repeatable."""
