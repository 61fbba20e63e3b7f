"""Bytes in words."""

GB = 1_000_000_000


def in_words(size: int) -> str:
    """`6.1 GB`, or `61.3 MB` for what is small."""
    return f"{size / GB:.1f} GB" if size >= GB / 10 else f"{size / 1e6:.1f} MB"
