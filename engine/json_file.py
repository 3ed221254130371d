"""JSON objects out of files that others wrote: whatever is wrong with one is a ModelError that names the file.

Nothing is read from what is not a regular file, such as a pipe, and no more than a file of its kind may have.
"""

import json
import reprlib
import stat
from pathlib import Path
from typing import Any

from kvrelay.engine.errors import ModelError

_MAX_DEPTH = 32
_MAX_SHOWN = 120


def read_object(file: Path, max_bytes: int) -> dict[str, Any] | None:
    """A small file's JSON object, nested no deeper than code that walks it can bear; None if there is no such file.

    Raises: ModelError.
    """
    content = read_file(file, max_bytes)
    if content is None:
        return None
    value = parse_object(content, str(file))
    if not _is_within(value, _MAX_DEPTH):
        raise ModelError(f"{file}: nested more than {_MAX_DEPTH} levels deep")
    return value


def read_file(file: Path, max_bytes: int) -> bytes | None:
    """A file's content; None if there is no such file. Raises: ModelError."""
    try:
        status = file.stat()
        check_regular(file, status.st_mode)
        if status.st_size > max_bytes:
            raise ModelError(f"{file}: {status.st_size} bytes; such a file has at most {max_bytes}")
        return file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}") from error


def check_regular(file: Path, mode: int) -> None:
    """Raises: ModelError for the mode of a pipe, a device or a folder."""
    if not stat.S_ISREG(mode):
        raise ModelError(f"{file}: not a file")


def parse_object(content: bytes, source: str, *, unique: bool = False) -> dict[str, Any]:
    """A JSON object. Raises: ModelError.

    source: what errors call it. unique: no key may stand twice in an object.
    """
    try:
        value = json.loads(content, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ModelError(f"{source}: nested too deep") from None
    except ValueError as error:
        raise ModelError(f"{source}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{source}: expected a JSON object")
    return value


def shown(value: object) -> str:
    """A value that somebody else wrote, for an error's line: short, and nothing in it but what can be printed."""
    text = _short.repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


_short = reprlib.Repr()
_short.maxlevel = 3
_short.maxstring = _short.maxother = 80
_short.maxlist = _short.maxdict = 8


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{shown(key)} stands twice")
        found[key] = value
    return found


def _is_within(value: Any, levels: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_within(child, levels - 1) for child in children)
