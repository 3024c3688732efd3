"""The definition of every quantizing kernel, in plain PyTorch on any device; it shares no rounding code with triton."""
