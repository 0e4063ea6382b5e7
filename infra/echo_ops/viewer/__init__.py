"""The viewer: a run's past and present in a browser, from the log alone, for whoever sits at this machine."""
