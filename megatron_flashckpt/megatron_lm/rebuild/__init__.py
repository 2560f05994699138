"""Local models of every rank, rebuilt from args; for `convert` only. Start reading at `model`."""
