"""The `potok` command. Each subcommand lives in its own module, imported only when it is named.

So `potok serve` reaches the start of its engine process without importing what chat, batch files or benchmarks need.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from potok import __version__
from potok.errors import PotokError, ServerError

#: Subcommand -> module with a function `register(app)`. The one table of imports that wait.
COMMANDS = {
    "serve": "potok.cli.serve",
    "chat": "potok.cli.chat",
    "run": "potok.cli.run",
    "bench": "potok.cli.bench",
    "inspect": "potok.cli.inspect",
    "cache": "potok.cli.cache",
    "replay": "potok.cli.replay",
}

EXIT_FAILED = 1  # the work began and could not be completed
EXIT_USAGE = 2  # nothing was done: a bad flag, a model that cannot be loaded, a port that is taken
EXIT_INTERRUPTED = 130

#: What typer raises for a bad command line, whichever click it stands on (newer ones carry their own).
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line (`sys.argv` by default) and exits with its code."""
    sys.exit(execute(sys.argv[1:] if arguments is None else list(arguments)))


def execute(arguments: list[str]) -> int:
    """The exit code. Whatever the user can do something about is one line on stderr."""
    named = [arguments[0]] if arguments and arguments[0] in COMMANDS else list(COMMANDS)
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback(help="Serve a language model to many at once.")(_globals)
    for command in named:
        import_module(COMMANDS[command]).register(app)
    try:
        code = app(arguments or ["--help"], prog_name="potok", standalone_mode=False)
    except UsageError as error:
        return _complain(error.format_message(), EXIT_USAGE)  # type: ignore[attr-defined]
    except PotokError as error:
        return _complain(str(error), EXIT_FAILED if isinstance(error, ServerError) else EXIT_USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left, as in `potok inspect ... | head`
        sys.stderr.close()
        return EXIT_FAILED
    return code if isinstance(code, int) else 0


def _complain(sentence: str, code: int) -> int:
    print(f"potok: {' '.join(sentence.split())}", file=sys.stderr)
    return code


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"potok {__version__}")
        raise typer.Exit


def _globals(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options that stand before the subcommand."""
