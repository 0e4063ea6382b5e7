"""What every role's process has: a bus from the settings, signals, an HTTP server, notices, places, and whose namespace it is."""
