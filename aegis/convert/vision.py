"""The tensors of a vision-language checkpoint that look at pictures, kept for later.

Nothing here computes with them: they go into one safetensors file, bit for bit, under their own
names.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from aegis.checkpoint.overlapped import OverlappedWriter
from aegis.checkpoint.safetensors import TensorInfo, file_start
from aegis.convert.source_data import Streams


def write_vision(
    path: Path, tensors: Iterable[TensorInfo], streams: Streams, report: Callable[[int], None]
) -> int:
    """Write the file through a piece in memory; its CRC-32. ``report`` is told of the bytes.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    start, ordered = file_start(tensors)
    crc, step = zlib.crc32(start), streams.piece_nbytes
    with OverlappedWriter(path, step) as writer:
        writer.write(np.frombuffer(start, np.uint8))
        report(len(start))
        for tensor in ordered:
            for at in range(0, tensor.nbytes, step):
                size = min(step, tensor.nbytes - at)
                piece = streams.read("vision", tensor.path, tensor.offset + at, size)
                crc = zlib.crc32(piece.data, crc)
                writer.write(piece)
                report(size)
    return crc
