"""The packaged runs of `echoswarm demo`."""
