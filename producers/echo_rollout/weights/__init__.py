"""From a manifest to installed weights: the log, a store or other workers as the source, one watcher that installs."""
