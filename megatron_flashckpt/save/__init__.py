"""The training process's side of a save. Start reading at `checkpointer`."""
