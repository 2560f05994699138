"""What a save directory holds: names, manifests and shards; start reading at `listing`."""
