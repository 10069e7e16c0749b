"""What streaming owes the machine: memory that was freed goes back to it."""

from __future__ import annotations

import ctypes
import os

# glibc keeps freed blocks of a few MB in its heap, with holes between them: without a trim now and then a
# process that streams a model grows by some 30 MB a transformer block, whatever it holds. Elsewhere the
# function does not exist, nor the need.
_TRIM = None if os.name == "nt" else getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back_freed() -> None:
    """Returns freed memory to the system; takes about a millisecond."""
    if _TRIM is not None:
        _TRIM(0)
