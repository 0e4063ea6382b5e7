"""Reading the log again: replay, export, rescore, retrain, view."""
