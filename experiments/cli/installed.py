"""The installed version of the package, and completion scripts for shells."""

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

from experiments.cli.command import Command, parser_for

NAME = "mistlab"
SHELLS = ("bash", "zsh")


def version() -> str:
    """The package's version, or a note that it is not installed."""
    try:
        return version_of(NAME)
    except PackageNotFoundError:
        return "not installed"


def completion(shell: str, commands: Mapping[str, Command]) -> str:
    """A completion script for a shell, with the commands, their options, and the values that
    options accept.

    File names are completed wherever neither a command nor an option is expected.
    """
    lines = [*_cases(commands)]
    names = " ".join(commands)
    body = f"""_mistlab() {{
    local words=() current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    if [ "$COMP_CWORD" = 1 ]; then words=({names}); fi
    case "${{COMP_WORDS[1]}} $before" in
{chr(10).join(line for line in lines if line.startswith("        "))}
        *)
            if [ "$COMP_CWORD" != 1 ] && [ "${{current:0:1}}" = - ]; then
                case "${{COMP_WORDS[1]}}" in
{chr(10).join(line for line in lines if not line.startswith("        "))}
                esac
            fi ;;
    esac
    COMPREPLY=($(compgen -W "${{words[*]}}" -- "$current"))
}}
complete -o default -F _mistlab mistlab
"""
    if shell == "zsh":
        return f"autoload -U +X bashcompinit && bashcompinit\n{body}"
    return body


def _cases(commands: Mapping[str, Command]) -> Iterator[str]:
    """The cases of a completion script: one for each option with fixed choices, and one for the
    options of each command.
    """
    for name, command in commands.items():
        options = []
        for action in parser_for(command, name)._actions:
            flags = [flag for flag in action.option_strings if flag.startswith("--")]
            options += flags
            if flags and action.choices:
                choices = " ".join(map(str, action.choices))
                yield f'        "{name} {flags[0]}") words=({choices}) ;;'
        yield f"    {name}) words=({' '.join(options)}) ;;"
