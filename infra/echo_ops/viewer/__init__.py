"""The viewer: shows a run, past or present, in a browser on this machine, from the log alone."""
