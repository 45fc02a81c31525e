"""nn.Modules over the kernels."""
