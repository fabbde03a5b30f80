"""The pictures that the READMEs show: assets/LANGUAGE/LESSON.PICTURE.svg, drawn again by every report."""

import re
from pathlib import Path

from lessonkit import pictures
from lessonkit.base.errors import Misdeclared
from lessonkit.base.files import ROOT
from lessonkit.lesson import names
from lessonkit.pages.guides import GUIDES

LINK = re.compile(r"assets/(?P<language>\w+)/(?P<lesson>\w+)\.(?P<picture>\w+)\.svg")


def pages() -> dict[Path, str]:
    """Each file that a README links, and the drawing that belongs in it. Raises Misdeclared for a link to nothing."""
    found = {}
    for readme in GUIDES.values():
        for link in LINK.finditer((ROOT / readme).read_text()):
            drawn = [each for name in names(link["lesson"]) for each in pictures.of(name)]
            picture = next((each for each in drawn if each.name == link["picture"]), None)
            if picture is None:
                raise Misdeclared(f"{readme} shows {link[0]}, but {link['lesson']} names no picture {link['picture']}")
            found[ROOT / link[0]] = picture.svg(link["language"])
    return found
