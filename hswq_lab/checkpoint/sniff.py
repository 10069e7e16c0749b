"""What a file that is no safetensors file really is, told from its first bytes."""

from __future__ import annotations

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer (the real file was never fetched: git lfs pull)"),
    (
        b"PK\x03\x04",
        "a zip archive, probably a PyTorch pickle (.pt, .ckpt), which could run code and is never loaded",
    ),
    (b"\x80\x02", "a Python pickle (.pt, .ckpt), which could run code and is never loaded"),
    (b"\x80\x04", "a Python pickle, which could run code and is never loaded"),
    (b"GGUF", "a GGUF file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"%PDF", "a PDF document"),
    (b"\x89PNG", "a PNG picture"),
)
PICKLE_SUFFIXES = frozenset({".ckpt", ".pt", ".pth", ".bin", ".pkl", ".pickle"})


def what_it_is(start: bytes, size: int) -> str | None:
    """Name the kind of a file by its first bytes.

    Args:
        start: the first bytes, up to 512.
        size: of the whole file.

    Returns:
        Words that follow "this is", or None where nothing is recognised.
    """
    if size == 0:
        return "an empty file"
    for magic, kind in _MAGIC:
        if start.startswith(magic):
            return kind
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head")):
        return "an HTML page (a download that needed a login or a wrong link)"
    if text.startswith((b"<?xml", b"<error")):
        return "an XML page (probably a server's error message)"
    if text.startswith((b"{", b"[")):
        return "a JSON text (an index or a server's error message)"
    return None
