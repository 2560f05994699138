"""What checkpoints of a job will take, before it runs. Pure arithmetic: no torch, no I/O."""
