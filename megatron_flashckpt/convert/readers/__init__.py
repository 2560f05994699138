"""Readers: one module per source format; `formats` selects the module."""
