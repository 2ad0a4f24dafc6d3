"""What Megatron-Core's modules become here: packed attention, rotary, router, norms, prediction layers."""
