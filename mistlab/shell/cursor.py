"""Moves between the commands of a script: blanks, comments, ends of lines and reserved words."""

import re

from mistlab.shell.lexer import BLANKS, Lexer

RESERVED = re.compile(r"[a-z]+(?=[\s;&|()<>]|$)|[{}!](?=\s|$)|\}(?=[;&|)])|\[\[(?=\s)")
CLOSING = frozenset(("then", "elif", "else", "fi", "do", "done", "esac", "}"))


class Cursor:
    """A lexer's position between words."""

    def __init__(self, lexer: Lexer) -> None:
        self._lexer = lexer

    def closes(self) -> bool:
        """Whether a word or sign ends a list of commands here."""
        if self._lexer.starts(";;") or self._lexer.starts(";&"):
            return True
        return self.reserved() in CLOSING

    def reserved(self) -> str:
        """The word at the position where it may be a reserved one, else empty."""
        lexer = self._lexer
        match = RESERVED.match(lexer.text, lexer.at, lexer.end)
        return match[0] if match else ""

    def blanks(self) -> None:
        """Skip blanks and comments on a line."""
        lexer = self._lexer
        while letter := lexer.peek():
            if letter in BLANKS or letter == "\r":
                lexer.at += 1
            elif lexer.starts("\\\n"):
                lexer.at += 2
            elif letter == "#":
                stop = lexer.text.find("\n", lexer.at, lexer.end)
                lexer.at = lexer.end if stop < 0 else stop
            else:
                return

    def lines(self) -> None:
        """Skip blanks and ends of lines, with the here-documents that follow them."""
        self.blanks()
        while self._lexer.peek() == "\n":
            self._lexer.at += 1
            if self._lexer.awaited:
                self._lexer.here_documents()
            self.blanks()

    def expect(self, word: str, opening: str, line: int) -> None:
        """Take a reserved word, or refuse the construct that lacks it."""
        self.lines()
        if self.reserved() != word:
            self._lexer.fail(f"{opening} has no {word}: write it", line)
        self._lexer.at += len(word)
        self.blanks()
