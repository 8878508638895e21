"""Collects real parallel text from the message catalogues of the programs on this machine (GNU gettext).

    python -m benchmarks.make_parallel_text de out     # writes out.en.txt and out.de.txt
    python -m pase_mtf.launch --model=transformer --data=out.en.txt,out.de.txt

Every installed program that speaks German brings its English messages with their German translations. Any system with
translations installed has tens of thousands of them; no network is needed. The texts keep the licences of the programs
they come from, so the files are made where they are used and not kept in the repository.
"""

from __future__ import annotations

import argparse
import contextlib
import gettext
import pathlib
import re
import sys

from benchmarks.commands import told_in_one_line
from pase_mtf.errors import UsageError
from pase_mtf.files import write_atomically

LOCALES = "/usr/share/locale"


def collect(language: str, locales: str = LOCALES) -> list[tuple[str, str]]:
    """All distinct pairs of an English message and its translation, sorted.

    Args:
      language: such as "de".
      locales: the folder with a folder per language.

    Raises:
      UsageError: there are none.
    """
    pairs = set()
    for path in sorted(pathlib.Path(locales, language, "LC_MESSAGES").glob("*.mo")):
        # A few old catalogues are not in the encoding that they name.
        with path.open("rb") as file, contextlib.suppress(OSError, UnicodeDecodeError, LookupError):
            for key, translation in gettext.GNUTranslations(file)._catalog.items():
                message = key[0] if isinstance(key, tuple) else key
                pair = tuple(_sentence(text) for text in (message.rpartition("\x04")[2], translation))
                if pair[0] != pair[1] and all(re.search(r"\w{2}", text) for text in pair):
                    pairs.add(pair)
    if not pairs:
        raise UsageError(f"no translations into {language!r} under {locales}; install a package with some, for "
                         "example git or coreutils")
    return sorted(pairs)


def _sentence(text: str) -> str:
    """One line, without the marks of keyboard shortcuts."""
    return " ".join(re.sub(r"[_&](?=\w)", "", text, count=1).split()) if len(text) < 40 else " ".join(text.split())


@told_in_one_line()
def main() -> int:
    """Writes the two files, and says how many lines they have."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("language", help="of the translations: de, fr, es, ...")
    parser.add_argument("output", help="beginning of the names of the two files")
    parser.add_argument("--locales", default=LOCALES)
    arguments = parser.parse_args()
    pairs = collect(arguments.language, arguments.locales)
    for side, suffix in enumerate(("en", arguments.language)):
        write_atomically(f"{arguments.output}.{suffix}.txt", "".join(f"{pair[side]}\n" for pair in pairs))
    print(f"{len(pairs):,} pairs: {arguments.output}.en.txt, {arguments.output}.{arguments.language}.txt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
