"""Bytes on disk. A change in this package changes the format; start reading at `manifest`."""
