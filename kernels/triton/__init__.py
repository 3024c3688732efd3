"""The kernels on the GPU, with the signatures of ``nvfp4_kernels.reference`` and bitwise its results."""
