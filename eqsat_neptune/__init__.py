"""A tensor compiler by equality saturation: plain array code in, provably equal fused kernels out."""
