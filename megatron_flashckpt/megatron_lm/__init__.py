"""Everything that knows Megatron; nothing else (but the shims) imports it."""
