"""The persistent cache: one file an entry, written whole or not at all, believed only if its digest fits.

An entry is a JSON header line (format, key, sha256 of the payload) and the payload.  The key is a digest of everything that the
payload depends on, this package's own source included, so no entry of another version is ever read.  Trouble with the disk
costs a warning and time, never a result.  What a process that was killed had been writing is removed by one that writes later.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

FORMAT = "eqsat-neptune-cache-1"
STALE = 3600.0  # seconds
_UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.[a-z0-9_]+")  # what `write_atomically` calls a file of the cache until it is whole
_swept: dict[Path, float] = {}  # cache folder → when this process looked through it


def directory() -> Path:
    """$EQSAT_NEPTUNE_CACHE, else eqsat_neptune under $XDG_CACHE_HOME or ~/.cache.  OSError where the user has no home."""
    own = os.environ.get("EQSAT_NEPTUNE_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "eqsat_neptune"
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder", "~/.cache/eqsat_neptune") from None


@functools.cache
def fingerprint() -> str:
    """Digest of this installation: version and every source file's path, size and time of change."""
    from . import __path__, __version__

    h = hashlib.sha256(__version__.encode())
    here = Path(next(iter(__path__)))
    roots = [here, *(here.parent / d for d in ("rules", "extraction", "codegen", "cost_models"))]
    for f in sorted(p for r in roots if r.is_dir() for p in r.rglob("*") if p.suffix in (".py", ".h", ".cuh")):
        s = f.stat()
        h.update(f"{f.relative_to(here.parent)} {s.st_size} {s.st_mtime_ns}\n".encode())
    return h.hexdigest()


def digest(*parts: str) -> str:
    h = hashlib.sha256()
    for p in (fingerprint(), *parts):
        raw = p.encode()
        h.update(len(raw).to_bytes(8, "little") + raw)
    return h.hexdigest()


def read(key: str) -> bytes | None:
    """The payload kept under the key, or None.  A damaged entry is reported, ignored, and made again by the caller."""
    try:
        path = directory() / key[:2] / key
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as e:
        warn(f"cache entry {path} cannot be read: {e.strerror}")
        return None
    head, newline, payload = raw.partition(b"\n")
    try:
        meta = json.loads(head) if newline else None
    except ValueError:
        meta = None
    if meta != {"format": FORMAT, "key": key, "sha256": hashlib.sha256(payload).hexdigest()}:
        warn(f"cache entry {path} is damaged or not ours; it is ignored and made again")
        return None
    return payload


def write(key: str, payload: bytes) -> None:
    """Keep the payload.  A full or read-only disk costs a warning."""
    meta = {"format": FORMAT, "key": key, "sha256": hashlib.sha256(payload).hexdigest()}
    folder = Path("~/.cache/eqsat_neptune")
    try:
        folder = directory()
        path = folder / key[:2] / key
        write_atomically(path, [json.dumps(meta).encode(), b"\n", payload])
    except OSError as e:
        warn(f"cache folder {folder} cannot be written ({e.strerror}); set EQSAT_NEPTUNE_CACHE to one that can")
        return
    last = _swept.get(folder)
    if last is None or time.monotonic() - last >= STALE:
        _swept[folder] = time.monotonic()
        with contextlib.suppress(OSError):  # of a cache that is being removed, say
            sweep(folder, path.stat().st_mtime - STALE)


def sweep(folder: Path, before: float) -> None:
    """Remove unfinished files that were last written to before a time by the file system's clock (a write takes milliseconds).  Others
    may do so at the same time; and a writer that had been stopped for so long finds that it cannot write, and says so."""
    for inner in _entries(folder):
        if re.fullmatch("[0-9a-f]{2}", inner.name) and inner.is_dir(follow_symlinks=False):
            for f in _entries(inner.path):
                with contextlib.suppress(OSError):
                    if _UNFINISHED.fullmatch(f.name) and f.is_file(follow_symlinks=False) and f.stat().st_mtime < before:
                        os.unlink(f.path)


def _entries(folder: Path | str) -> list[os.DirEntry[str]]:
    """None where another process has removed the folder."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return list(entries)
    return []


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Write beside the path, then rename: a reader sees the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, tmp = tempfile.mkstemp(prefix=f".{path.name[:16]}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as f:
            f.writelines(chunks)
        os.replace(tmp, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(tmp)
        raise


def warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)
