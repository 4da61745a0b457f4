"""Lists of names, as tables of settings write them."""


def names_in(text: str) -> frozenset[str]:
    """The names in a text, with blanks between them.

    >>> sorted(names_in("one two"))
    ['one', 'two']
    """
    return frozenset(text.split())
