"""A run as Parquet files: `exporter` writes and goes on with them, `verifying` checks them, `queries` asks them in SQL."""
