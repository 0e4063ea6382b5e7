"""The common parts of every role's process: a bus from the settings, signals, an HTTP server, notices, places, and ownership."""
