"""Shows a run: a model fed from the log, a live screen, plain lines, a summary and an HTML report."""
