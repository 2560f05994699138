"""Saves and loads of several checkpoint systems in turn. Start reading at `driver`."""
