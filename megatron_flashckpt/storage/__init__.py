"""Where bytes end up. Knows no checkpoints and no ranks."""
