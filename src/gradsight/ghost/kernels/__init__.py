"""Kernels for matrix units, asked for with GhostEngine(kernel=...).

product_kernel         when a kernel is used, compared with today's route, and given up
triton_split_product   the kernel itself, where Triton is installed
"""
