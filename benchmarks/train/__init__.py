"""`python -m benchmarks train`: what checkpoints cost a run of real Megatron's own loop."""
