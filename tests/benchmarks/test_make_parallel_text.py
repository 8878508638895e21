"""Parallel text out of message catalogues, for the launcher's --data."""

import struct
import subprocess
import sys

from benchmarks.make_parallel_text import collect


def _catalogue(pairs):
    """A .mo file (https://www.gnu.org/software/gettext/manual, "The Format of GNU MO Files")."""
    header = "Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=2; plural=n != 1;\n"
    pairs = sorted([("", header), *pairs])
    keys, values = ([text.encode() for text in side] for side in zip(*pairs, strict=True))
    start = 28 + 16 * len(pairs)
    tables, blob = [b"", b""], b""
    for side, texts in enumerate((keys, values)):
        for text in texts:
            tables[side] += struct.pack("<II", len(text), start + len(blob))
            blob += text + b"\0"
    return struct.pack("<7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, start) + b"".join(tables) + blob


def test_parallel_text_from_message_catalogues(tmp_path, repository):
    folder = tmp_path / "de" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    (folder / "one.mo").write_bytes(_catalogue([
        ("_Open file", "Datei ö_ffnen"), ("%s: %d", "%s: %d"), ("same", "same"), ("menu\x04Two\nlines", "Zwei\nZeilen"),
        ("one file\0many files", "eine Datei\0viele Dateien")]))
    (folder / "broken.mo").write_bytes(_catalogue([("a word", "ein Wort")]).replace(b"Wort", b"W\xf6rt"))
    assert collect("de", str(tmp_path)) == [
        ("Open file", "Datei öffnen"), ("Two lines", "Zwei Zeilen"), ("one file", "eine Datei"),
        ("one file", "viele Dateien")]
    done = subprocess.run([sys.executable, "-m", "benchmarks.make_parallel_text", "xx", tmp_path / "out", "--locales",
                           tmp_path], cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no translations into 'xx'")
