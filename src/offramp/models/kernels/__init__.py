"""Training conv-BN-ReLU with kernels of our own (Triton), for GPUs; `reference.py` is the same without them.

MSDNet's maps are many and thin: 6 to 48 new channels per layer. Libraries pad such channels, change layouts and run
one kernel after another for what is a single sweep over memory.
"""
