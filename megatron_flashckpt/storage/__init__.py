"""Storage of named byte strings. Does not know checkpoints or ranks."""
