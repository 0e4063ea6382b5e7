"""Dead letters, found, mended, and written again exactly once: `echoswarm dlq` (docs/decisions/0026-redrive.md)."""
