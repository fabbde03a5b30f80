"""The words of the search index. Sphinx's own split and stem each word as often as it stands in the book."""

import re
from functools import cache

import jieba
from sphinx.search.en import SearchEnglish
from sphinx.search.zh import SearchChinese

HAN = re.compile(r"[\u4e00-\u9fff]+")


class English(SearchEnglish):
    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self.stem = cache(super().stem)  # type: ignore[method-assign]


class Chinese(SearchChinese):
    """Only what is Chinese in a text is cut into words by jieba's dictionary: of these pages, most is code."""

    language_name = "English"  # whose stemmer the page has: it looks for `EnglishStemmer`

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self.stem = cache(super().stem)  # type: ignore[method-assign]
        self._cut = cache(lambda run: tuple(jieba.cut_for_search(run)))

    def split(self, input: str) -> list[str]:
        latin = self.latin1_letters.findall(input)
        self.latin_terms.update(latin)
        return [word for run in HAN.findall(input) for word in self._cut(run)] + latin
