"""Starts every role of a run as a child process on this machine, watches them, and ends them in order."""
