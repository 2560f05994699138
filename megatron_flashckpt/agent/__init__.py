"""The agent: one process per node that owns the slots, persists and commits. No torch."""
