"""Episodes that were logged elsewhere, put into the run's log as training data (ECHO-2, appendix D)."""
