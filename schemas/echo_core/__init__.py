"""The rules that several parts share, as pure functions and small classes: no I/O, no clock, no framework."""
