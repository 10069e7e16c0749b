"""An independent restatement of the formats in numpy, integers and fractions: slow, literal, no torch."""

from __future__ import annotations

import bisect
from fractions import Fraction

import numpy as np

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3_table() -> list[float]:
    """Values of the codes 0x00 .. 0x7E, from the bit fields."""
    values = []
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        values.append(mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))
    return values


E4M3 = e4m3_table()


def nearest_code(magnitude: float, table: list[float]) -> int:
    """Index of the nearest value; of two equally near ones the even index; the last one saturates."""
    above = bisect.bisect_left(table, magnitude)
    if above in {0, len(table)}:
        return min(above, len(table) - 1)
    exact = Fraction(magnitude)
    return min((above - 1, above), key=lambda i: (abs(Fraction(table[i]) - exact), i % 2))


def quantize_block(x: np.ndarray, s: np.float32) -> tuple[int, list[int]]:
    """E4M3 code and the 16 E2M1 codes of one block of fp32 values, round to nearest."""
    with np.errstate(all="ignore"):
        b = np.float32(np.abs(x).max()) / np.float32(6)
        r = np.float32(0) if b == 0 else min(b / s, np.float32(448))
    c = nearest_code(float(r), E4M3)
    return c, encode_block(x, s, c)


def encode_block(x: np.ndarray, s: np.float32, c: int) -> list[int]:
    t = np.float32(s) * np.float32(E4M3[c])
    if t == 0:
        return [0] * 16
    with np.errstate(over="ignore"):
        y = x / t
    signs = np.signbit(y)
    return [
        int(sign) << 3 | (7 if abs(v) > 6 else nearest_code(abs(float(v)), E2M1))
        for v, sign in zip(y, signs, strict=True)
    ]


def error(x: np.ndarray, s: np.float32, c: int, h: np.ndarray | None) -> np.float32:
    """Squared error of a block in units of s squared, fp32, summed by halves."""
    with np.errstate(all="ignore"):
        codes = encode_block(x, s, c)
        values = np.array([E2M1[n & 7] * (-1 if n & 8 else 1) for n in codes], np.float32)
        d = values * np.float32(E4M3[c]) - x / s
        e = d * d if h is None else h * (d * d)
        while e.size > 1:
            e = e[: e.size // 2] + e[e.size // 2 :]
    return e[0]


def best_code(x: np.ndarray, s: np.float32, codes: list[int], h: np.ndarray | None) -> int:
    """The first of the ascending codes with the least error; the plain one if none is finite."""
    best, least = quantize_block(x, s)[0], np.float32(np.inf)
    for c in codes:
        found = error(x, s, c, h)
        if found < least:
            best, least = c, found
    return best


def padded(x: np.ndarray, multiple: int = 16) -> np.ndarray:
    rows, cols = (-(-n // multiple) * multiple for n in x.shape)
    out = np.zeros((rows, cols), np.float32)
    out[: x.shape[0], : x.shape[1]] = x
    return out


def quantize(x: np.ndarray, s: float) -> tuple[np.ndarray, np.ndarray]:
    """Codes [R, K/2] and linear E4M3 bytes [R, K/16], both padded."""
    x = padded(x)
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((x.shape[0], x.shape[1] // 16), np.uint8)
    for row in range(x.shape[0]):
        for block in range(scales.shape[1]):
            part = slice(16 * block, 16 * block + 16)
            scales[row, block], codes[row, part] = quantize_block(x[row, part], np.float32(s))
    return codes[:, 0::2] * 16 + codes[:, 1::2], scales


def swizzle(linear: np.ndarray) -> np.ndarray:
    """By the published offset, byte by byte."""
    rows, cols = linear.shape
    row_tiles, col_tiles = -(-rows // 128), -(-cols // 4)
    flat = np.zeros(row_tiles * col_tiles * 512, np.uint8)
    for r in range(rows):
        for c in range(cols):
            offset = ((r // 128) * col_tiles + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
            flat[offset] = linear[r, c]
    return flat.reshape(row_tiles * 128, col_tiles * 4)


def values(codes: np.ndarray, scales: np.ndarray) -> list[list[Fraction]]:
    """E2M1 value times block scale of every packed code, exact; tensor scale left out. Scales linear."""
    out = []
    for row in range(codes.shape[0]):
        nibbles = [n for byte in codes[row].tolist() for n in (byte >> 4, byte & 15)]
        line = []
        for col, nibble in enumerate(nibbles):
            value = Fraction(E2M1[nibble & 7]) * Fraction(E4M3[scales[row, col // 16]])
            line.append(-value if nibble & 8 else value)
        out.append(line)
    return out


def hadamard(n: int) -> np.ndarray:
    """Dense, fp64, by Kronecker products."""
    h4 = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float64)
    h = np.ones((1, 1))
    while h.shape[0] < n:
        h = np.kron(h4, h)
    return h / np.sqrt(n)


def rotate(x: np.ndarray, group: int) -> np.ndarray:
    """fp64, each group of a row by the dense matrix."""
    parts = x.astype(np.float64).reshape(x.shape[0], -1, group)
    return (parts @ hadamard(group)).reshape(x.shape)


def butterflies(x: np.ndarray, group: int) -> np.ndarray:
    """The order of fp32 additions that the rotation's docstring fixes, one scalar at a time, on one row."""
    v = x.astype(np.float32).copy()
    for start in range(0, v.size, group):
        stride = 1
        while stride < group:
            for i in range(group):
                if (i // stride) % 4 == 0:
                    at = [start + i + stride * q for q in range(4)]
                    a, b, c, d = v[at]
                    p, m, s, t = a + b, a - b, c + d, c - d
                    v[at] = [p + t, p - t, m + s, s - m]
            stride *= 4
    return v * np.float32(1 / np.sqrt(group))


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32 in Python integers, from the paper."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        hi0, lo0 = divmod(0xD2511F53 * c0, 1 << 32)
        hi1, lo1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) % (1 << 32), (k1 + 0xBB67AE85) % (1 << 32)
    return c0, c1, c2, c3


def uniform(seed: int, index: int) -> Fraction:
    """The u of one element."""
    seed %= 1 << 64
    word = philox((seed % (1 << 32), seed >> 32), (index % (1 << 32), index >> 32, 0, 0))[0]
    return Fraction(word >> 8, 1 << 24)


def round_to(value: Fraction, mantissa_bits: int, least_exponent: int) -> Fraction:
    """Nearest number with so many bits after the leading one, ties to even; no upper limit."""
    if value == 0:
        return value
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, least_exponent) - mantissa_bits)
    return round(value / step) * step  # Fraction's round() takes ties to even
