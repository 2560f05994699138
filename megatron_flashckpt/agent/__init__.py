"""One process per node that owns the slots, persists and commits. Never imports torch."""
