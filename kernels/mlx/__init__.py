"""The mlx backend: Metal on Apple silicon, CUDA on NVIDIA, the CPU for checking.

Set here, because MLX reads them once, when it is first used.
"""

import os

# TF32 would round the inputs of float32 products to 10 bits.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
# MLX counts every input of an operation as memory it works on and starts a new command buffer after
# so many MiB. The slot pools are inputs of every experts block: each would have its own buffer.
os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "1000000")
