"""Benchmarks of saves, loads and their parts: `python -m benchmarks --help` lists them."""
