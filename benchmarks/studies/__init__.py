"""One module per question about this package alone. `benchmarks.__main__` lists them."""
