"""Files that are written whole or not at all, and files of tensors, read or refused in a sentence."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["read_metadata", "read_tensors", "write_whole"]


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` to `path` so that every reader, at any moment, finds the old file or the new one.

    The bytes go to a hidden file in the same folder, are flushed to the disk, and only then take the name. A
    process that is killed on the way may leave that hidden file behind, never half of `path`. A symbolic link
    stays a link: the file that it names is replaced.

    Raises:
        OSError: the folder is absent or may not be written, the disk is full, or `path` is a folder.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder")
    # Cut, so that this name is not too long for the system where the file's own is not: 50 characters of UTF-8 are
    # 200 bytes at most, and 255 is what most systems take.
    partial = target.with_name(f".{target.name[:50]}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:  # Ctrl-C as well
        partial.unlink(missing_ok=True)
        raise
    _flush_folder(target.parent)


def read_metadata(path: Path, kind: str, error: type[Exception]) -> dict[str, str]:
    """Metadata alone of a safetensors file, however large; raises as `read_tensors` does."""
    with _opened(path, kind, error) as file:
        return file.metadata() or {}


def read_tensors(path: Path, kind: str, error: type[Exception]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file.

    Raises:
        error: it is missing, a folder, truncated or no such file, or safetensors is not installed. The message is a
            sentence, and calls the file a `kind`.
    """
    with _opened(path, kind, error) as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}


@contextmanager
def _opened(path: Path, kind: str, error: type[Exception]) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as missing:
        raise error(f"Reading a {kind} needs {missing.name}: pip install safetensors") from missing
    try:
        if path.is_dir():
            raise error(f"{path} is a folder, not the file of a {kind}.")
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise error(f"{path} does not exist: there is no {kind}.") from None
    except (SafetensorError, OSError) as found:
        raise error(f"{path} is truncated, or no safetensors file ({found}).") from found


def _flush_folder(folder: Path) -> None:
    """Make the new name last through a power cut, where the system lets a folder be flushed."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
