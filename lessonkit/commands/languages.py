"""`translate` and `read`: the catalogues of translations, and a lesson in another language."""

from typing import Annotated

from lessonkit.base.files import ROOT
from lessonkit.base.words import CATALOGUES, LANGUAGES, catalogue
from lessonkit.commands import show
from lessonkit.pages import catalogues

import typer


def translate(
    missing: Annotated[bool, typer.Option("--missing", help="Change nothing; list what has no translation.")] = False,
) -> None:
    """Bring the catalogues of translations up to date with the sources; count what each still lacks."""
    for language in LANGUAGES:
        if not missing:
            catalogues.update(language)
        body = []
        for name in CATALOGUES:
            waiting = catalogues.waiting(name, language)
            drafts = sum(message.fuzzy for message in waiting)
            words = sum(len(str(message.id).split()) for message in waiting)
            body.append([name, len(catalogues.load(name, language)), len(waiting), drafts, words])
            for message in waiting if missing else ():
                where = message.locations[0][0] if message.locations else ""
                show.console.print(f"{name}: {where}: {message.id}", highlight=False, soft_wrap=True)
        folder = catalogue("", language).parent.relative_to(ROOT)
        show.table(str(folder), ["catalogue", "messages", "without translation", "drafts", "words of these"], body)
