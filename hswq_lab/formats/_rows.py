"""Row chunks: the reference works through a matrix in pieces, so that its temporaries stay small."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# A quarter of a million elements a piece: a megabyte of fp32, so that its temporaries stay in cache.
CHUNK_ELEMENTS = 1 << 18


def row_chunks(rows: int, cols: int, factor: int = 1) -> Iterator[slice]:
    """Slices of whole rows that cover ``range(rows)`` in order, ``factor * CHUNK_ELEMENTS`` elements or less.

    What is computed a chunk at a time is computed row by row, so results do not depend on the chunks.
    """
    step = max(1, factor * CHUNK_ELEMENTS // max(1, cols))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def ceil_to(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple
