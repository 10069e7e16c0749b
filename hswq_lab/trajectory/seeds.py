"""The twenty seeds that the published figures of the reference system were made with."""

from __future__ import annotations

from typing import Final

SEEDS_20: Final[tuple[int, ...]] = (
    42,
    137,
    5517,
    92048,
    371506,
    5293047,
    64820153,
    731509284,
    8426170395,
    9517038246,
    210987,
    6543210,
    98765432,
    1357924680,
    2468135791,
    3579246812,
    4680357923,
    5791468034,
    6802579145,
    7913680256,
)
"""Fixed in code, so that a seed that fails cannot be exchanged for a better one."""
