"""All code that knows Megatron; only this package and the shims import Megatron."""
