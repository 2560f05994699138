"""The part of a save that runs in the training process. Start reading at `checkpointer`."""
