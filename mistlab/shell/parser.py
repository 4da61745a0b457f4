"""Parses the text of a shell script into commands."""

import re
from collections.abc import Callable

from mistlab.shell.command_parts import DECLARATIONS, read_assignment, read_condition, unbraced
from mistlab.shell.lexer import BLANK, BLANKS, WORD_ENDS, Lexer, lexer_of, lexer_of_value
from mistlab.shell.shell_text import LAUNCH_LINE_ALONE, LineError, Text
from mistlab.shell.syntax import (
    AndOr,
    Arm,
    Assignment,
    Background,
    Bracketed,
    Case,
    Command,
    Count,
    ForCount,
    ForIn,
    Function,
    Group,
    If,
    Literal,
    Pipeline,
    RawWord,
    Redirect,
    Redirected,
    Script,
    Simple,
    While,
)

RESERVED = re.compile(r"[a-z]+(?=[\s;&|()<>]|$)|[{}!](?=\s|$)|\}(?=[;&|)])|\[\[(?=\s)")
CLOSING = frozenset(("then", "elif", "else", "fi", "do", "done", "esac", "}"))


class Cursor:
    """The position of a parser between the words that its lexer reads."""

    def __init__(self, lexer: Lexer) -> None:
        self._lexer = lexer

    def closes(self) -> bool:
        """Return whether the word at the position ends a list of commands, such as ``fi`` or
        ``;;``.
        """
        if self._lexer.starts(";;") or self._lexer.starts(";&"):
            return True
        return self.reserved() in CLOSING

    def reserved(self) -> str:
        """Return the word at the position if it may be a reserved word such as ``if``, otherwise an
        empty text.
        """
        lexer = self._lexer
        match = RESERVED.match(lexer.text, lexer.at, lexer.end)
        return match[0] if match else ""

    def blanks(self) -> None:
        """Skip blanks and comments up to the end of the line."""
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
        """Skip blanks and line ends, and read the here-documents that begin on the next line."""
        self.blanks()
        while self._lexer.peek() == "\n":
            self._lexer.at += 1
            if self._lexer.awaited:
                self._lexer.here_documents()
            self.blanks()

    def expect(self, word: str, opening: str, line: int) -> None:
        """Read a reserved word such as ``fi``; refuses a script in which it is missing."""
        self.lines()
        if self.reserved() != word:
            self._lexer.fail(f"{opening} lacks {word}: write {word} after it", line)
        self._lexer.at += len(word)
        self.blanks()


# Parses redirections, and the patterns of ``case`` commands.


_REDIRECT = re.compile(
    r"(\d+|\{\w+\})?(&>>|&>|<<<|<<-|<<|<>|<&|<(?!\()|>>|>&|>\||>(?!\())", re.ASCII
)


def read_redirect(lexer: Lexer, blanks: Callable[[], None]) -> Redirect | None:
    """Parse a redirection at the lexer's position, or return None if there is none."""
    match = _REDIRECT.match(lexer.text, lexer.at, lexer.end)
    if match is None or BLANK.match(lexer.text, lexer.at, lexer.end):
        return None
    line = lexer.line
    lexer.at = match.end()
    blanks()
    target = lexer.word()
    if not target.source:
        lexer.fail(f"{match[0]} is not followed by a file: write one", line)
    redirect = Redirect(operator=match[2], target=target, line=line, descriptor=match[1] or "")
    if match[2] in ("<<", "<<-"):
        plain = re.sub(r"\\(.)|['\"]", r"\1", target.source)
        lexer.awaited.append((redirect, plain, plain != target.source))
    return redirect


def read_pattern(lexer: Lexer) -> RawWord:
    """Parse a pattern of ``case``; ``extglob`` patterns contain parentheses."""
    parts, start = list[RawWord](), lexer.at
    while True:
        parts.append(lexer.word(WORD_ENDS))
        before = lexer.text[lexer.at - 1 : lexer.at]
        if lexer.peek() != "(" or before not in "?*+@!":
            break
        line = lexer.line
        lexer.at += 1
        inner = lexer.word(")")
        lexer.close(")", "(", line)
        parts += [_literal("(", line), inner, _literal(")", line)]
    if len(parts) == 1:
        return parts[0]
    every = tuple(part for word in parts for part in word.parts)
    return RawWord(parts=every, line=parts[0].line, source=lexer.text[start : lexer.at])


def _literal(text: str, line: int) -> RawWord:
    return RawWord(parts=(Literal(text=text, line=line),), line=line, source=text)


_FUNCTION = re.compile(r"([^\s\"'`$;&|<>(){}=\\]+)[ \t]*\([ \t]*\)\s*")
_FUNCTION_WORD = re.compile(r"function[ \t]+([^\s\"'`$;&|<>(){}\\]+)[ \t]*(?:\([ \t]*\))?\s*")
_FOR_NAME = re.compile(r"[ \t]*([A-Za-z_]\w*)", re.ASCII)
_LONGEST = 1 << 17


def parsed(text: str, base: int = 0) -> Script:
    """Parse the text of a file into commands; ``base`` is added to its line numbers."""
    if len(text) > _LONGEST:
        raise LineError(base + 1, f"the file is longer than 128 KiB: {LAUNCH_LINE_ALONE}")
    if any(ord(letter) >= 0xF0000 for letter in text if not letter.isascii()):
        raise LineError(base + 1, "the file has private-use Unicode characters: take them out")
    return _whole(lexer_of(text.replace("\r\n", "\n"), base, script_until))


def parsed_value(text: Text) -> Script:
    """Parse a text that a script gives to ``eval`` or ``bash -c`` into commands."""
    return _whole(lexer_of_value(text, script_until))


def _whole(lexer: Lexer) -> Script:
    script = script_until(lexer, "")
    if lexer.peek():
        closing = RESERVED.match(lexer.text, lexer.at)
        message = f"{closing[0] if closing else lexer.peek()} closes nothing: leave it out"
        lexer.fail(message)
    return script


def script_until(lexer: Lexer, closing: str) -> Script:
    """Parse commands up to a closing character, which the caller has to read."""
    return Parser(lexer).script(closing)


class Parser:
    """Parses commands from a lexer's position on."""

    def __init__(self, lexer: Lexer) -> None:
        self._lexer = lexer
        self._cursor = Cursor(lexer)

    def script(self, closing: str = "") -> Script:
        """Parse commands up to a closing character, a closing word or the end of the text."""
        lexer = self._lexer
        self._cursor.lines()
        start, commands = lexer.at, list[Command]()
        while lexer.peek() and lexer.peek() not in (closing, ")") and not self._cursor.closes():
            if lexer.peek() in ";&|":
                lexer.fail(f"{lexer.peek()} follows no command: take it out")
            commands.append(self._and_or())
            self._cursor.lines()
        return Script(commands=tuple(commands), source=lexer.text[start : lexer.at].strip())

    def _and_or(self) -> Command:
        """Parse commands joined by ``&&`` and ``||``, and the ``;``, ``&`` or newline that ends
        them.
        """
        lexer, line = self._lexer, self._lexer.line
        start = lexer.at
        commands, operators = [self._pipeline()], list[str]()
        sources = [lexer.text[start : lexer.at].strip()]
        while lexer.starts("&&") or lexer.starts("||"):
            operators.append(lexer.text[lexer.at : lexer.at + 2])
            lexer.at += 2
            self._cursor.lines()
            start = lexer.at
            commands.append(self._pipeline())
            sources.append(lexer.text[start : lexer.at].strip())
        made: Command = commands[0]
        if operators:
            made = AndOr(
                commands=tuple(commands),
                operators=tuple(operators),
                sources=tuple(sources),
                line=line,
            )
        if lexer.peek() == "&":
            lexer.at += 1
            made = Background(command=made, line=line)
        elif lexer.peek() == ";" and not lexer.starts(";;") and not lexer.starts(";&"):
            lexer.at += 1
        self._cursor.blanks()
        return made

    def _pipeline(self) -> Command:
        lexer, line, negated = self._lexer, self._lexer.line, False
        while (word := self._cursor.reserved()) in ("!", "time"):
            negated ^= word == "!"
            lexer.at += len(word)
            self._cursor.blanks()
            if word == "time" and lexer.starts("-p "):
                lexer.at += 2
                self._cursor.blanks()
        commands = [self._command()]
        while lexer.peek() == "|" and not lexer.starts("||"):
            lexer.at += 2 if lexer.starts("|&") else 1
            self._cursor.lines()
            commands.append(self._command())
        if len(commands) == 1 and not negated:
            return commands[0]
        return Pipeline(commands=tuple(commands), negated=negated, line=line)

    def _command(self) -> Command:
        lexer = self._lexer
        lexer.deeper()
        line = lexer.line
        made = self._compound() or self._function() or self._simple()
        if not isinstance(made, (Simple, Function)) and (redirects := self._redirects()):
            made = Redirected(command=made, redirects=redirects, line=line)
        lexer.depth -= 1
        return made

    def _compound(self) -> Command | None:
        lexer, word = self._lexer, self._cursor.reserved()
        if lexer.peek() == "(":
            return self._parentheses()
        readers = {
            "{": self._group,
            "if": self._if,
            "for": self._for,
            "while": self._while,
            "until": self._while,
            "case": self._case,
            "[[": self._bracketed,
        }
        if word in readers:
            return readers[word]()
        if word in ("select", "coproc"):
            lexer.fail(f"{word} asks someone at a terminal: {LAUNCH_LINE_ALONE}")
        if word in CLOSING:
            lexer.fail(f"{word} closes nothing: leave it out")
        return None

    def _parentheses(self) -> Command:
        lexer, line, start = self._lexer, self._lexer.line, self._lexer.at
        if lexer.starts("((") and (stop := lexer.closing_pair(start + 2)) is not None:
            expression = lexer.expression(start + 2, stop)
            lexer.at = stop + 2
            self._cursor.blanks()
            return Count(expression=expression, line=line, source=lexer.text[start : stop + 2])
        lexer.at += 1
        script = self.script(")")
        if lexer.peek() != ")":
            lexer.unclosed("(", line)
        if not script.commands:
            lexer.fail("() holds no command: take it out", line)
        lexer.at += 1
        self._cursor.blanks()
        return Group(script=script, line=line, subshell=True)

    def _group(self) -> Command:
        line = self._lexer.line
        self._lexer.at += 1
        script = self.script()
        self._cursor.expect("}", "{", line)
        return Group(script=script, line=line)

    def _if(self) -> Command:
        lexer, line = self._lexer, self._lexer.line
        branches, otherwise = list[tuple[Script, Script]](), None
        word = "if"
        while word != "fi":
            lexer.at += len(word)
            if word == "else":
                otherwise = self.script()
            else:
                condition = self.script()
                self._cursor.expect("then", word, line)
                branches.append((condition, self.script()))
            word = self._cursor.reserved()
            if word not in ("elif", "else", "fi") or (otherwise and word != "fi"):
                lexer.fail("if is not closed: write fi after its commands", line)
        lexer.at += 2
        self._cursor.blanks()
        return If(branches=tuple(branches), otherwise=otherwise, line=line)

    def _while(self) -> Command:
        line, word = self._lexer.line, self._cursor.reserved()
        self._lexer.at += len(word)
        condition = self.script()
        body = self._do(word, line)
        return While(condition=condition, body=body, line=line, until=word == "until")

    def _do(self, opening: str, line: int) -> Script:
        self._cursor.expect("do", opening, line)
        body = self.script()
        self._cursor.expect("done", opening, line)
        return body

    def _for(self) -> Command:
        lexer, line = self._lexer, self._lexer.line
        lexer.at += len("for")
        self._cursor.blanks()
        if lexer.starts("(("):
            return self._for_count(line)
        match = _FOR_NAME.match(lexer.text, lexer.at, lexer.end)
        if match is None:
            lexer.fail("for is not followed by a name: write for NAME in WORDS", line)
        lexer.at = match.end()
        self._cursor.lines()
        words: tuple[RawWord, ...] | None = None
        if self._cursor.reserved() == "in" or re.match(r"in(?=[\s;])", lexer.text[lexer.at :][:3]):
            lexer.at += 2
            words = self._words()
        if lexer.peek() == ";":
            lexer.at += 1
        return ForIn(name=match[1], words=words, body=self._do("for", line), line=line)

    def _words(self) -> tuple[RawWord, ...]:
        words: list[RawWord] = []
        self._cursor.blanks()
        while (letter := self._lexer.peek()) and letter not in ";\n&|()":
            words += unbraced(self._lexer.word())
            self._cursor.blanks()
        return tuple(words)

    def _for_count(self, line: int) -> Command:
        lexer, start = self._lexer, self._lexer.at + 2
        stop = lexer.closing_pair(start)
        ends = [] if stop is None else [at for at in range(start, stop) if lexer.text[at] == ";"]
        if stop is None or len(ends) != 2:
            lexer.fail("for (( needs three expressions: write for ((START; CONDITION; STEP))", line)
        first, second = ends
        offsets = ((start, first), (first + 1, second), (second + 1, stop))
        parts = [lexer.expression(*each) for each in offsets]
        lexer.at = stop + 2
        self._cursor.blanks()
        if lexer.peek() == ";":
            lexer.at += 1
        self._cursor.lines()
        if self._cursor.reserved() == "{":
            group = self._group()
            assert isinstance(group, Group)
            body = group.script
        else:
            body = self._do("for", line)
        return ForCount(start=parts[0], condition=parts[1], step=parts[2], body=body, line=line)

    def _case(self) -> Command:
        lexer, line = self._lexer, self._lexer.line
        lexer.at += len("case")
        self._cursor.blanks()
        subject = lexer.word()
        self._cursor.expect("in", "case", line)
        arms: list[Arm] = []
        self._cursor.lines()
        while self._cursor.reserved() != "esac":
            if not lexer.peek():
                lexer.fail("case is not closed: write esac after its patterns", line)
            arms.append(self._arm(line))
            self._cursor.lines()
        lexer.at += len("esac")
        self._cursor.blanks()
        return Case(subject=subject, arms=tuple(arms), line=line)

    def _arm(self, line: int) -> Arm:
        lexer = self._lexer
        if lexer.peek() == "(":
            lexer.at += 1
        patterns: list[RawWord] = []
        while True:
            self._cursor.lines()
            patterns.append(read_pattern(lexer))
            self._cursor.lines()
            if lexer.peek() != "|":
                break
            lexer.at += 1
        if lexer.peek() != ")" or not patterns[-1].parts:
            lexer.fail("a pattern of case has no ): write ) after the pattern", line)
        lexer.at += 1
        body = self.script()
        ending = next((each for each in (";;&", ";;", ";&") if lexer.starts(each)), "")
        lexer.at += len(ending)
        if not ending and self._cursor.reserved() != "esac":
            lexer.fail("an arm of case has no ;;: write ;; after its commands")
        return Arm(patterns=tuple(patterns), body=body, ending=ending or ";;")

    def _bracketed(self) -> Command:
        lexer, line, start = self._lexer, self._lexer.line, self._lexer.at
        lexer.at += 2
        condition = read_condition(lexer, line)
        self._cursor.blanks()
        return Bracketed(
            condition=condition, line=line, source=lexer.text[start : lexer.at].strip()
        )

    def _function(self) -> Command | None:
        lexer, line = self._lexer, self._lexer.line
        match = _FUNCTION_WORD.match(lexer.text, lexer.at, lexer.end)
        match = match or _FUNCTION.match(lexer.text, lexer.at, lexer.end)
        if match is None:
            return None
        lexer.at = match.end()
        self._cursor.lines()
        if not lexer.peek():
            lexer.fail(f"function {match[1]} has no body: write commands in braces", line)
        return Function(name=match[1], body=self._command(), line=line)

    def _redirects(self) -> tuple[Redirect, ...]:
        redirects: list[Redirect] = []
        while redirect := self._redirect():
            redirects.append(redirect)
        return tuple(redirects)

    def _redirect(self) -> Redirect | None:
        self._cursor.blanks()
        return read_redirect(self._lexer, self._cursor.blanks)

    def _simple(self) -> Command:
        lexer, line, start = self._lexer, self._lexer.line, self._lexer.at
        assignments, words = list[Assignment](), list[RawWord | Assignment]()
        redirects: list[Redirect] = []
        declares = False
        while True:
            self._cursor.blanks()
            if redirect := self._redirect():
                redirects.append(redirect)
            elif not (letter := lexer.peek()) or (letter in "\n;&|()<>" and not self._is_pipe()):
                break
            elif (not words or declares) and (made := read_assignment(lexer, self._cursor.blanks)):
                (words if words else assignments).append(made)
            else:
                words += unbraced(lexer.word())
                first = words[0]
                declares = isinstance(first, RawWord) and first.bare in DECLARATIONS
        if lexer.at == start or lexer.peek() == "(":
            lexer.fail(f"{lexer.peek() or 'the end'} is not expected here: quote it or take it out")
        return Simple(
            assignments=tuple(assignments),
            words=tuple(words),
            redirects=tuple(redirects),
            line=line,
            last_line=lexer.line_of(max(start, lexer.at - 1)),
            source=lexer.text[start : lexer.at].strip(),
        )

    def _is_pipe(self) -> bool:
        lexer = self._lexer
        is_blank = BLANK.match(lexer.text, lexer.at, lexer.end)
        return lexer.starts("<(") or lexer.starts(">(") or is_blank is not None
