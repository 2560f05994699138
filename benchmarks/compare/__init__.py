"""Saves and loads of several checkpoint systems, one after the other. Start reading at `driver`."""
