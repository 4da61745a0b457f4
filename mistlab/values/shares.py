"""Shares of a number of like things."""


def even_shares(count: int, parts: int) -> tuple[int, ...]:
    """So many things divided into parts as evenly as possible; the first parts take the rest.

    >>> even_shares(32, 5)
    (7, 7, 6, 6, 6)
    """
    each, rest = divmod(count, parts)
    return (each + 1,) * rest + (each,) * (parts - rest)


def spread_shares(count: int, parts: int) -> list[int]:
    """So many things divided into parts as evenly as possible; the rest is spread over all parts.

    >>> spread_shares(32, 5)
    [6, 6, 7, 6, 7]
    """
    return [count * (part + 1) // parts - count * part // parts for part in range(parts)]
