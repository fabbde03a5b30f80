"""The language of commands: `--lang zh` anywhere on the command line, the help in it, `read` and `translate`."""

import sys
from pathlib import Path
from typing import Annotated, Any

from lessonkit.base import renames
from lessonkit.base.files import ROOT
from lessonkit.base.prose import normal, read_as
from lessonkit.base.words import CATALOGUES, LANGUAGES, catalogue, language, later, retold, said, speaking, translated
from lessonkit.commands import show
from lessonkit.exercise import source
from lessonkit.lesson import names
from lessonkit.pages import catalogues, glossary

import typer
from typer import rich_utils
from typer.core import TyperGroup

CHOICES = ("en", *LANGUAGES)
# What typer itself says, by its name there.
FRAME = {
    "ARGUMENTS_PANEL_TITLE": later("Arguments"),
    "OPTIONS_PANEL_TITLE": later("Options"),
    "COMMANDS_PANEL_TITLE": later("Commands"),
    "ERRORS_PANEL_TITLE": later("Error"),
    "DEFAULT_STRING": later("[default: {}]"),
    "REQUIRED_LONG_STRING": later("[required]"),
    "RICH_HELP": later("Try [blue]'{command_path} {help_option}'[/] for help."),
}
WRONG = (  # what typer says of words that it cannot take; the longer sentence first
    later("No such command {name}. Did you mean {others}?"),
    later("No such command {name}."),
    later("No such option: {name} (Possible options: {others})"),
    later("No such option: {name}"),
    later("Missing argument {name}."),
    later("Missing option {name}."),
    later("Option {name} requires an argument."),
    later("Got unexpected extra argument(s) ({name})"),
)
USAGE, HELP = later("Usage: "), later("Show this message and exit.")


_UsageError: Any = typer.BadParameter.__base__  # typer gives no name to it


class Usage(typer.Context.formatter_class):  # type: ignore[valid-type,misc]
    """How a command is called, behind a word of the language."""

    word = USAGE

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(prog, args, prefix or self.word)


class Spoken(TyperGroup):
    """A group of commands that takes `--lang`, before a command's name or after it, and says its help in it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest, wanted = _without_language(args)
        ctx.with_resource(speaking(wanted))
        _say_help(self, ctx)
        _frame(ctx)
        return super().parse_args(ctx, rest)

    def invoke(self, ctx: Any) -> Any:
        """What is wrong of an argument is a sentence of its own: in another language it has no "Invalid value: "."""
        try:
            return super().invoke(ctx)
        except _UsageError as wrong:
            if language() == "en":
                raise
            if isinstance(wrong, typer.BadParameter) and not (wrong.param or wrong.param_hint):
                raise _Sentence(wrong.message, wrong.ctx) from None
            english = wrong.format_message()
            if (sentence := retold(english, WRONG, language())) == english:
                raise
            raise _Sentence(sentence, wrong.ctx) from None


class _Sentence(typer.BadParameter):
    def format_message(self) -> str:
        return self.message


def _without_language(args: list[str]) -> tuple[list[str], str]:
    """The words of a command line without `--lang zh`, and the language; "" where there is none."""
    rest, wanted, words = list[str](), "", iter(args)
    for word in words:
        option, given, value = word.partition("=")
        if option != "--lang":
            rest.append(word)
        elif (wanted := value if given else next(words, "")) not in CHOICES:
            sentence = said("{option} takes one of {choices}, not {wanted}")
            raise typer.BadParameter(sentence.format(option="--lang", choices=", ".join(CHOICES), wanted=repr(wanted)))
    return rest, wanted


def _frame(ctx: Any) -> None:
    """Say in the language what typer says around the help of a command and around an error."""
    for name, english in FRAME.items():
        setattr(rich_utils, name, said(english))
    Usage.word = said(USAGE)
    context: Any = next(each for each in type(ctx).__mro__ if "formatter_class" in vars(each))
    context.formatter_class = Usage


def _say_help(command: Any, ctx: Any) -> None:
    """Say in the language the help of a command, of its arguments and options, and of the commands in it.

    Each paragraph becomes one line, which the terminal breaks: rich keeps the line ends of all but the first.
    """
    if command.help:
        command.help = "\n\n".join(said(each) for each in catalogues.help_paragraphs(command.help))
    for parameter in command.get_params(ctx):
        if getattr(parameter, "help", None):
            parameter.help = said(normal(parameter.help))
    for each in getattr(command, "commands", {}).values():
        if isinstance(each.rich_help_panel, str):
            each.rich_help_panel = said(each.rich_help_panel)
        _say_help(each, ctx)


def read(
    lesson: Annotated[str, typer.Argument(help="A lesson, an exercise, or a file of the course.")],
) -> None:
    """Print a lesson's file; with `--lang zh` its comments and docstrings in Chinese, its code as it is."""
    path = _file(lesson)
    text = path.read_text()
    now = language()
    sys.stdout.write(read_as(text, path.suffix, lambda message: in_words(message, now)))
    if now != "en" and (left := catalogues.untranslated(path, now)):
        words = said("{left} of {all} paragraphs have no translation yet and are shown in English")
        print(words.format(left=len(left), all=len(catalogues.messages(path))), file=sys.stderr)


def in_words(message: str, wanted: str) -> str:
    """A message in a language; the list of a lesson's new words, which is generated, from its terms."""
    if wanted != "en" and message.startswith(glossary.HEAD):
        return glossary.new_words(message, wanted)
    return translated(message, wanted)


def _file(which: str) -> Path:
    """The file that a reader means: a path, a lesson (in CUDA C++ its program), an exercise."""
    if (
        (path := (ROOT / which).resolve()).is_file()
        and path.is_relative_to(ROOT)
        and path.suffix in catalogues.SUFFIXES
    ):
        return path
    lessons = names(which) or names(renames.meant("lessons", which) or which)
    found = [ROOT / f"{name.replace('.', '/')}.py" for name in lessons] or [each.path for each in source.find(which)]
    if len(found) != 1:
        if not found:
            words = said("no lesson or exercise matches {which}; `list` and `exercise list` show all")
            raise typer.BadParameter(words.format(which=repr(which)))
        closest = ", ".join(each.stem for each in found[:5])
        words = said("{which} names {count} lessons and exercises, expected one: {closest}")
        raise typer.BadParameter(words.format(which=repr(which), count=len(found), closest=closest))
    program = found[0].with_suffix(".cu")
    return program if program.exists() else found[0]


def translate(
    missing: Annotated[bool, typer.Option("--missing", help="Change nothing; list what has no translation.")] = False,
) -> None:
    """Bring the catalogues of translations up to date with the sources; count what each still lacks."""
    for each in LANGUAGES:
        if not missing:
            catalogues.update(each)
        body = []
        for name in CATALOGUES:
            waiting = catalogues.waiting(name, each)
            drafts = sum(message.fuzzy for message in waiting)
            words = sum(len(str(message.id).split()) for message in waiting)
            body.append([name, len(catalogues.load(name, each)), len(waiting), drafts, words])
            for message in waiting if missing else ():
                where = message.locations[0][0] if message.locations else ""
                show.console.print(f"{name}: {where}: {message.id}", highlight=False, soft_wrap=True)
        folder = catalogue("", each).parent.relative_to(ROOT)
        titles = [
            said("catalogue"),
            said("messages"),
            said("without translation"),
            said("drafts"),
            said("words of these"),
        ]
        show.table(str(folder), titles, body)
