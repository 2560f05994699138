"""Contents of a save directory: names, manifests and shards; `listing` is the entry point."""
