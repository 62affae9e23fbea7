"""Download the original traces: resumed where it stopped, verified, and whole or not at all.

``python -m kvcache.paper.digests.download --raw DIR`` fetches the files of ``data/sources.toml``
that digests are made from. Size and sha256 are checked against that file; where it knows none they are
recorded in ``data/checksums.toml`` on the first download and checked from then on.

pooch keeps the files and verifies them; what it lacks is resuming, the one thing that is written here.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pooch
import requests
from tqdm import tqdm
from urllib3.exceptions import HTTPError, NameResolutionError, ReadTimeoutError

from kvcache.files import atomic_path
from kvcache.paper.digests.sources import RawFile, Sources, load_sources
from kvcache.paper.project import project_root
from kvcache.traces.formats import Head, TraceError

__all__ = ["DownloadError", "Transfer", "download", "load_checksums", "needed_files", "record_checksum"]

_BLOCK_BYTES = 1 << 20
_HEADERS = {"User-Agent": "kvcache-download/0.1", "Accept-Encoding": "identity"}
# Worth another try; any other status of 400 and above will not change by itself.
_PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
_RESERVE_BYTES = 50 << 20


class DownloadError(RuntimeError):
    """A file that could not be had: says which, from where, and what went wrong."""


class _Retry(Exception):
    """A failure that another attempt may mend; ``wait_s`` if the server named a time."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass(frozen=True)
class Transfer:
    """How to transfer.

    Attributes
    ----------
    timeout_s : a connection that sends nothing for so long has stalled.
    attempts : per address, counted anew whenever one brought new bytes.
    backoff_s : wait before the second attempt, doubled for each further one up to a minute.
    progress : whether to show a bar.
    sleep : waits for some seconds.
    """

    timeout_s: float = 30.0
    attempts: int = 5
    backoff_s: float = 1.0
    progress: bool = True
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        if self.timeout_s <= 0 or self.attempts < 1 or self.backoff_s < 0:
            raise ValueError(f"{self}: expected timeout_s > 0, attempts >= 1, backoff_s >= 0")


def needed_files(sources: Sources, everything: bool = False) -> list[RawFile]:
    """The files to download: those that are some digest's first choice, or all that have an address."""
    first = {source.inputs[0] for source in sources.digests.values()}
    return [file for file in sources.files.values() if file.url and (everything or file.name in first)]


def download(file: RawFile, folder: str | Path, transfer: Transfer = Transfer()) -> tuple[Path, str]:
    """Have a file in a folder, downloading what is missing of it.

    Parameters
    ----------
    file : what to fetch; ``bytes`` and ``sha256`` are checked where they are known.
    folder : where it goes, made if missing. While it is incomplete it is ``.NAME.part`` there.
    transfer : how.

    Returns
    -------
    path : of the file.
    sha256 : of its bytes.

    Raises
    ------
    DownloadError
        If no address gives the file whole and right.
    """
    path = Path(folder) / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        problem = _wrong(path, file)
        if problem is None:
            return path, pooch.file_hash(str(path))
        _say(transfer, f"{file.name}: the file there is damaged ({problem}); downloading it again")
        path.unlink()
    if not file.url:
        raise DownloadError(f"{file.name}: no address to download it from")
    pooch.get_logger().setLevel("WARNING")  # the progress bar says it
    failures = []
    for url in file.url:
        try:
            for last in (False, True):
                try:
                    return path, _retrieve(file, url, path, transfer)
                except ValueError as error:  # what came is not the file: once more, from scratch
                    if last:
                        raise DownloadError(f"{error} (twice)") from error
                    _say(transfer, f"{file.name}: {error}")
        except DownloadError as error:
            failures.append(f"{url}: {error}")
    raise DownloadError(f"{file.name}: " + "; ".join(failures))


def _retrieve(file: RawFile, url: str, path: Path, transfer: Transfer) -> str:
    """The sha256 of what pooch has fetched and put in place; ValueError where that is not the file."""

    def fetch(url: str, target: str, _pooch: Any) -> None:
        partial = _fetch(file, url, path.parent, transfer)
        _notes(partial).unlink(missing_ok=True)
        partial.replace(target)
        problem = _wrong(Path(target), file) or (None if file.sha256 else _no_trace(Path(target)))
        if problem:
            raise ValueError(problem)

    known = file.sha256 and f"sha256:{file.sha256}"
    pooch.retrieve(url, known, fname=path.name, path=path.parent, downloader=fetch)
    return pooch.file_hash(str(path))


def _say(transfer: Transfer, message: str) -> None:
    if transfer.progress:
        print(message, file=sys.stderr)


def _wrong(path: Path, file: RawFile) -> str | None:
    """What is wrong with a complete file, None if nothing."""
    size = path.stat().st_size
    if file.bytes is not None and size != file.bytes:
        return f"{size:,} bytes; expected {file.bytes:,}"
    digest = pooch.file_hash(str(path)) if file.sha256 else None
    return None if digest == file.sha256 else f"sha256 is {digest}; expected {file.sha256}"


def _no_trace(path: Path) -> str | None:
    """Why an unverified file cannot be a trace (such as a page that asks for a login), None if it can."""
    try:
        Head.of(path).recognise({})
    except TraceError as error:
        return f"what came is no trace: {error}"
    return None


# ---- one address ----------------------------------------------------------------------------------


def _fetch(file: RawFile, url: str, folder: Path, transfer: Transfer) -> Path:
    """Bring the partial file to its full length, in as many attempts as make progress."""
    partial = folder / f".{file.name}.part"
    left, wait = transfer.attempts, transfer.backoff_s
    while True:
        before = _size(partial)
        try:
            _attempt(file, url, partial, transfer)
            return partial
        except _Retry as failure:
            after = _size(partial)
            if after > before:
                left, wait = transfer.attempts, transfer.backoff_s
            left -= 1
            if not left:
                kept = f"; {after:,} bytes are kept, the next run goes on from there" if after else ""
                raise DownloadError(f"{failure} ({transfer.attempts} attempts){kept}") from failure
            _say(transfer, f"{file.name}: {failure}; trying again")
            transfer.sleep(max(wait, failure.wait_s))
            wait = min(2 * wait, 60.0)


def _attempt(file: RawFile, url: str, partial: Path, transfer: Transfer) -> None:
    have = _resumable(file, url, partial)
    if file.bytes is not None and have == file.bytes:
        return
    headers = dict(_HEADERS)
    if have:
        validator = _read_notes(partial).get("validator")
        headers |= {"Range": f"bytes={have}-"} | ({"If-Range": validator} if validator else {})
    try:
        with requests.get(url, headers=headers, stream=True, timeout=transfer.timeout_s) as response:
            _receive(response, file, partial, have, transfer)
    except requests.TooManyRedirects as error:
        raise DownloadError(f"too many redirects ({error})") from error
    except (requests.ConnectionError, requests.Timeout, HTTPError) as error:
        cause = getattr(error.args[0], "reason", error.args[0]) if error.args else error
        if isinstance(cause, NameResolutionError):
            raise DownloadError(
                "the host's name is not found; is there a network? (the digests in data/digests need none)"
            ) from error
        if isinstance(error, requests.Timeout) or isinstance(cause, ReadTimeoutError):
            raise _Retry(f"nothing came for {transfer.timeout_s:g} s") from error
        raise _Retry(f"no connection ({cause})") from error


def _receive(response: Any, file: RawFile, partial: Path, have: int, transfer: Transfer) -> None:
    """Write what a response brings behind the ``have`` bytes of the partial file."""
    start, _, whole = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
    if response.status_code == 416:  # nothing beyond what we have: the whole file, or not the file at all
        if not (whole.isdigit() and int(whole) == have):
            partial.unlink(missing_ok=True)
            raise _Retry("the server has fewer bytes than were kept")
        return
    if response.status_code >= 400:
        problem = f"HTTP {response.status_code} {response.reason}"
        if response.status_code in _PASSING_STATUS:
            raise _Retry(problem, _retry_after(response))
        raise DownloadError(problem)
    if response.status_code == 206 and start.split("-")[0] != str(have):
        partial.unlink()
        raise _Retry("the server sent another range than was asked for")
    if response.status_code == 200:
        have = 0  # the server knows no ranges, or has another file now: it sends the whole of it
    length = response.headers.get("Content-Length", "")
    total = int(whole) if whole.isdigit() else have + int(length) if length.isdigit() else None
    if total is not None and file.bytes is not None and total != file.bytes:
        raise DownloadError(f"the server has {total:,} bytes; expected {file.bytes:,}")
    missing, free = (total or file.bytes or have) - have, shutil.disk_usage(partial.parent).free
    if missing + _RESERVE_BYTES > free:
        raise DownloadError(f"{missing:,} bytes are missing and only {free:,} are free in {partial.parent}")
    _write_notes(partial, response)
    bar = tqdm(
        desc=file.name, initial=have, total=total, unit="B", unit_scale=True, disable=not transfer.progress
    )
    response.raw.enforce_content_length = False  # how much came is told below
    with partial.open("r+b" if have else "wb") as out, bar:
        out.seek(have)
        while block := response.raw.read1(_BLOCK_BYTES):
            out.write(block)
            have += len(block)
            bar.update(len(block))
    if total is not None and have < total:
        raise _Retry(f"the connection ended after {have:,} of {total:,} bytes")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _resumable(file: RawFile, url: str, partial: Path) -> int:
    """How many bytes of the partial file can be built upon; the file is removed if none."""
    have, notes = _size(partial), _read_notes(partial)
    too_long = file.bytes is not None and have > file.bytes
    # Without a checksum only the server's validator tells that the rest belongs to the same file.
    untold = file.sha256 is None and not (notes.get("validator") and notes.get("url") == url)
    if too_long or untold:
        partial.unlink(missing_ok=True)
        return 0
    return have


def _retry_after(response: Any) -> float:
    value = response.headers.get("Retry-After", "")
    return min(float(value), 300.0) if value.isdigit() else 0.0


def _notes(partial: Path) -> Path:
    return partial.with_name(partial.name + ".json")


def _read_notes(partial: Path) -> dict[str, str]:
    try:
        return json.loads(_notes(partial).read_text())
    except (OSError, ValueError):
        return {}


def _write_notes(partial: Path, response: Any) -> None:
    """Keep the strong validator of what is being downloaded (a weak one proves nothing)."""
    validator = response.headers.get("ETag", "")
    if not validator or validator.startswith("W/"):
        validator = response.headers.get("Last-Modified", "")
    first = response.history[0] if response.history else response
    with atomic_path(_notes(partial)) as draft:
        draft.write_text(json.dumps({"url": first.request.url, "validator": validator}))


# ---- checksums ------------------------------------------------------------------------------------


def load_checksums(path: str | Path | None = None) -> dict[str, dict[str, Any]]:
    """What earlier downloads recorded: by file name its ``sha256`` and ``bytes``; empty if nothing."""
    path = project_root() / "data" / "checksums.toml" if path is None else Path(path)
    if not path.is_file():
        return {}
    with path.open("rb") as handle:
        return tomllib.load(handle)


def record_checksum(name: str, sha256: str, size: int, path: str | Path | None = None) -> None:
    """Add a file's checksum to ``data/checksums.toml``, sorted by name."""
    path = project_root() / "data" / "checksums.toml" if path is None else Path(path)
    known = {**load_checksums(path), name: {"sha256": sha256, "bytes": size}}
    lines = ["# Recorded on first download, checked from then on; see data/sources.toml.", ""]
    for key, entry in sorted(known.items()):
        lines += [f'["{key}"]', f'sha256 = "{entry["sha256"]}"', f"bytes = {entry['bytes']}", ""]
    with atomic_path(path) as partial:
        partial.write_text("\n".join(lines).rstrip() + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, 1 if a file could not be had."""
    parser = argparse.ArgumentParser(
        prog="python -m kvcache.paper.digests.download", description="Download original traces."
    )
    parser.add_argument(
        "names", nargs="*", help="files of data/sources.toml (default: what the digests need)"
    )
    parser.add_argument("--raw", type=Path, default=Path("data/raw"), help="folder for the files (data/raw)")
    parser.add_argument("--all", action="store_true", help="also the files that no digest needs")
    parser.add_argument(
        "--timeout", type=float, default=30.0, help="seconds without a byte that count as a stall"
    )
    options = parser.parse_args(arguments)
    sources = load_sources()
    unknown = [name for name in options.names if name not in sources.files]
    if unknown:
        parser.error(f"{unknown[0]!r} is not in data/sources.toml; there are {', '.join(sources.files)}")
    files = [sources.files[name] for name in options.names] or needed_files(sources, options.all)
    recorded = load_checksums()
    failed = []
    for file in files:
        known = recorded.get(file.name, {}) if file.sha256 is None else {}
        try:
            path, digest = download(replace(file, **known), options.raw, Transfer(timeout_s=options.timeout))
        except (DownloadError, OSError) as error:
            print(f"download: {error}", file=sys.stderr)
            failed.append(file.name)
            continue
        size = path.stat().st_size
        if file.sha256 is None and not known:
            record_checksum(file.name, digest, size)
        state = "recorded" if file.sha256 is None and not known else "verified"
        print(f"{file.name:42} {size:>13,} bytes, sha256 {state}")
    if failed:
        print(
            f"download: {len(failed)} of {len(files)} files are missing: {', '.join(failed)}", file=sys.stderr
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
