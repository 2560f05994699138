"""Hugging Face models: their architectures, their files, and their tensors by Megatron's names."""
