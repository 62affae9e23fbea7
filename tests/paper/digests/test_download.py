"""Downloads from a local server that truncates, corrupts, stalls, redirects and ignores ranges."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvcache.paper.digests import download as module
from kvcache.paper.digests import load_digest
from kvcache.paper.digests.__main__ import main as digests_main
from kvcache.paper.digests.download import (
    DownloadError,
    Transfer,
    download,
    load_checksums,
    needed_files,
    record_checksum,
)
from kvcache.paper.digests.sources import RawFile, load_sources

BODY = b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + b"".join(
    b"2023-11-16 18:17:%02d.0000000,%d,%d\n" % (i % 60, i, i + 1) for i in range(4000)
)
SHA = hashlib.sha256(BODY).hexdigest()
HALF = len(BODY) // 2


class Server(ThreadingHTTPServer):
    """Serves ``body``; ``script`` holds what to do with the next requests, then all goes well."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.body, self.etag, self.ranges = BODY, '"v1"', True
        self.script: list[str] = []
        self.requests: list[tuple[str, str | None]] = []
        self.release = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/trace.csv"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.requests.append((self.path, asked))
        act = server.script.pop(0) if server.script else "ok"
        if act.isdigit():
            self.send_response(int(act))
            self.send_header("Content-Length", "0")
            self.send_header("Retry-After", "7")
            self.end_headers()
            return
        if act == "redirect":
            self.send_response(302)
            self.send_header("Location", "/elsewhere/trace.csv")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = server.body
        if act == "corrupt":
            body = body[:100] + b"#" + body[101:]
        if act == "page":
            body = b"<html><body>Please sign in</body></html>"
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and server.ranges else 0
        valid = self.headers.get("If-Range") in (None, server.etag)
        if start and valid and start >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if start and valid:
            if act == "other range":
                start = 1
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            start = 0
            self.send_response(200)
        self.send_header("Content-Length", str(len(body) - start))
        if server.etag:
            self.send_header("ETag", server.etag)
        self.end_headers()
        if act in ("truncate", "stall", "break"):
            self.wfile.write(body[start : start + (len(body) - start) // 2])
            self.wfile.flush()
            if act == "stall":
                server.release.wait(20)
            self.close_connection = True
            return
        self.wfile.write(body[start:])


@pytest.fixture
def server():
    running = Server()
    thread = threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield running
    running.release.set()
    running.shutdown()
    running.server_close()


@pytest.fixture
def waits():
    return []


@pytest.fixture
def transfer(waits):
    return Transfer(timeout_s=0.5, attempts=3, backoff_s=1.0, progress=False, sleep=waits.append)


@pytest.fixture
def known(server):
    return RawFile("trace.csv", (server.url,), sha256=SHA, bytes=len(BODY))


def ranges(server) -> list[str | None]:
    return [asked for _, asked in server.requests]


def test_a_plain_download(server, known, transfer, tmp_path):
    path, digest = download(known, tmp_path / "new" / "raw", transfer)
    assert path.read_bytes() == BODY
    assert digest == SHA
    assert [p.name for p in path.parent.iterdir()] == ["trace.csv"]
    assert ranges(server) == [None]


def test_what_is_there_and_right_is_not_asked_for_again(server, known, transfer, tmp_path):
    (tmp_path / "trace.csv").write_bytes(BODY)
    assert download(known, tmp_path, transfer)[1] == SHA
    assert server.requests == []


@pytest.mark.parametrize("damage", [BODY[:-7], BODY[:-1] + b"#"])
def test_what_is_there_and_damaged_is_fetched_anew(server, known, transfer, tmp_path, damage):
    (tmp_path / "trace.csv").write_bytes(damage)
    assert download(known, tmp_path, transfer)[0].read_bytes() == BODY
    assert len(server.requests) == 1


@pytest.mark.parametrize("act", ["truncate", "stall"])
def test_a_broken_transfer_is_resumed_where_it_stopped(server, known, transfer, tmp_path, waits, act):
    server.script = [act, act]
    assert download(known, tmp_path, transfer)[0].read_bytes() == BODY
    quarter = HALF + (len(BODY) - HALF) // 2
    assert ranges(server) == [None, f"bytes={HALF}-", f"bytes={quarter}-"]
    assert waits == [1.0, 1.0]


def test_a_later_run_goes_on_where_the_first_gave_up(server, known, transfer, tmp_path):
    server.script = ["truncate"]
    once = replace(transfer, attempts=1)
    with pytest.raises(
        DownloadError, match=f"ended after {HALF:,} of {len(BODY):,} bytes .*{HALF:,} bytes are kept"
    ):
        download(known, tmp_path, once)
    assert not (tmp_path / "trace.csv").exists()
    assert download(known, tmp_path, once)[0].read_bytes() == BODY
    assert ranges(server) == [None, f"bytes={HALF}-"]


def test_a_server_that_ignores_ranges_sends_the_whole_again(server, known, transfer, tmp_path):
    server.ranges = False
    server.script = ["truncate"]
    assert download(known, tmp_path, transfer)[0].read_bytes() == BODY
    assert ranges(server) == [None, f"bytes={HALF}-"]


def test_a_server_that_ignores_ranges_and_always_breaks_is_given_up(server, known, transfer, tmp_path, waits):
    server.ranges = False
    server.script = ["truncate"] * 50
    with pytest.raises(DownloadError, match=r"\(3 attempts\)"):
        download(known, tmp_path, transfer)
    assert ranges(server) == [None, f"bytes={HALF}-", f"bytes={HALF}-"]  # only the first brought new bytes
    assert waits == [1.0, 2.0]


def test_a_range_that_was_not_asked_for_is_refused(server, known, transfer, tmp_path):
    server.script = ["truncate", "other range"]
    assert download(known, tmp_path, transfer)[0].read_bytes() == BODY
    assert ranges(server) == [None, f"bytes={HALF}-", None]


def test_a_partial_file_that_is_whole_needs_no_byte(server, known, transfer, tmp_path):
    (tmp_path / ".trace.csv.part").write_bytes(BODY)
    assert download(known, tmp_path, transfer)[1] == SHA
    assert download(replace(known, bytes=None), tmp_path, transfer)[1] == SHA
    assert server.requests == []


def test_416_on_a_whole_partial_file_completes_it(server, known, transfer, tmp_path):
    (tmp_path / ".trace.csv.part").write_bytes(BODY)
    assert download(replace(known, bytes=None), tmp_path, transfer)[0].read_bytes() == BODY
    assert ranges(server) == [f"bytes={len(BODY)}-"]


def test_416_on_a_partial_file_that_is_too_long_starts_anew(server, known, transfer, tmp_path):
    (tmp_path / ".trace.csv.part").write_bytes(BODY + b"more")
    assert download(replace(known, bytes=None), tmp_path, transfer)[0].read_bytes() == BODY
    assert ranges(server) == [f"bytes={len(BODY) + 4}-", None]


def test_corruption_is_found_and_mended(server, known, transfer, tmp_path):
    server.script = ["corrupt"]
    assert download(known, tmp_path, transfer)[0].read_bytes() == BODY
    assert ranges(server) == [None, None]


def test_a_corrupt_beginning_of_a_resumed_file_is_found(server, known, transfer, tmp_path):
    (tmp_path / ".trace.csv.part").write_bytes(b"#" * HALF)
    assert download(known, tmp_path, transfer)[0].read_bytes() == BODY
    assert ranges(server) == [f"bytes={HALF}-", None]


def test_lasting_corruption_is_an_error_and_leaves_nothing(server, known, transfer, tmp_path):
    server.script = ["corrupt", "corrupt"]
    with pytest.raises(DownloadError, match=rf"trace.csv: .*sha256 is [0-9a-f]+; expected {SHA} \(twice\)"):
        download(known, tmp_path, transfer)
    assert list(tmp_path.iterdir()) == []


def test_another_size_than_expected(server, known, transfer, tmp_path):
    with pytest.raises(DownloadError, match=f"the server has {len(BODY):,} bytes; expected 17"):
        download(replace(known, bytes=17), tmp_path, transfer)


def test_redirects_are_followed_also_when_resuming(server, known, transfer, tmp_path):
    server.script = ["redirect", "truncate", "redirect"]
    assert download(known, tmp_path, transfer)[0].read_bytes() == BODY
    assert server.requests == [
        ("/trace.csv", None),
        ("/elsewhere/trace.csv", None),
        ("/trace.csv", f"bytes={HALF}-"),
        ("/elsewhere/trace.csv", f"bytes={HALF}-"),
    ]


def test_endless_redirects_are_an_error(server, known, transfer, tmp_path):
    server.script = ["redirect"] * 50
    with pytest.raises(DownloadError, match="redirect"):
        download(known, tmp_path, transfer)


def test_a_busy_server_is_waited_for(server, known, transfer, tmp_path, waits):
    server.script = ["503", "429"]
    assert download(known, tmp_path, transfer)[0].read_bytes() == BODY
    assert waits == [7.0, 7.0]


def test_waits_double_up_to_the_last_attempt(server, known, tmp_path, waits, monkeypatch):
    monkeypatch.setattr(module, "_retry_after", lambda _: 0.0)
    server.script = ["500"] * 9
    with pytest.raises(DownloadError, match=r"HTTP 500 .*\(4 attempts\)"):
        download(
            known, tmp_path, Transfer(0.5, attempts=4, backoff_s=0.5, progress=False, sleep=waits.append)
        )
    assert waits == [0.5, 1.0, 2.0]


def test_a_missing_file_is_not_asked_for_twice_and_the_next_address_is_tried(
    server, known, transfer, tmp_path
):
    server.script = ["404"]
    with pytest.raises(DownloadError, match=r"trace.csv: http.*: HTTP 404 Not Found"):
        download(known, tmp_path, transfer)
    assert len(server.requests) == 1
    server.script = ["404"]
    two = replace(known, url=(server.url, server.url + "?mirror"))
    assert download(two, tmp_path, transfer)[0].read_bytes() == BODY
    assert server.requests[-1][0] == "/trace.csv?mirror"


def test_a_file_that_changed_on_the_server_is_not_glued_together(server, transfer, tmp_path):
    unknown = RawFile("trace.csv", (server.url,))
    server.script = ["truncate"]
    with pytest.raises(DownloadError):
        download(unknown, tmp_path, replace(transfer, attempts=1))
    server.body, server.etag = BODY.replace(b"2023", b"2022"), '"v2"'
    assert download(unknown, tmp_path, transfer)[0].read_bytes() == server.body
    assert ranges(server) == [None, f"bytes={HALF}-"]


def test_without_checksum_and_validator_nothing_is_resumed(server, transfer, tmp_path):
    server.etag = ""
    server.script = ["truncate"]
    assert download(RawFile("trace.csv", (server.url,)), tmp_path, transfer)[0].read_bytes() == BODY
    assert ranges(server) == [None, None]


def test_a_page_is_not_taken_for_an_unknown_trace(server, transfer, tmp_path):
    server.script = ["page", "page"]
    with pytest.raises(DownloadError, match=r"what came is no trace: .*<html>"):
        download(RawFile("trace.csv", (server.url,)), tmp_path, transfer)
    assert list(tmp_path.iterdir()) == []


def test_no_network_is_said_plainly(known, transfer, tmp_path, monkeypatch):
    def unresolved(*_, **__):
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    with pytest.raises(DownloadError, match=r"the host's name is not found; is there a network\?.*need none"):
        download(replace(known, url=("https://nowhere.invalid/trace.csv",)), tmp_path, transfer)


def test_a_refused_connection_is_retried_then_said(transfer, known, tmp_path, waits):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/trace.csv"
    with pytest.raises(DownloadError, match=r"no connection \(.*refused.*\(3 attempts\)"):
        download(replace(known, url=(url,)), tmp_path, transfer)
    assert waits == [1.0, 2.0]


def test_a_full_disk_is_noticed_before(server, known, transfer, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_RESERVE_BYTES", 1 << 60)
    with pytest.raises(DownloadError, match=f"{len(BODY):,} bytes are missing and only .* are free"):
        download(known, tmp_path, transfer)


def test_a_file_without_address(transfer, tmp_path):
    with pytest.raises(DownloadError, match="no address to download it from"):
        download(RawFile("lengths.parquet"), tmp_path, transfer)
    with pytest.raises(ValueError, match="expected timeout_s > 0"):
        Transfer(timeout_s=0)


# ---- the command line ---------------------------------------------------------------------------------


@pytest.fixture
def project(server, tmp_path, monkeypatch):
    """A project of one file with and one without a known checksum."""
    digest = """
[digest.{0}]
title = "t"
origin = "o"
licence = "l"
citation = "c"
how = "h"
inputs = ["{0}.csv"]
upper_output = 1
upper_input = 1
upper_note = "n"
"""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sources.toml").write_text(
        f'[file."a.csv"]\nurl = ["{server.url}"]\nsha256 = "{SHA}"\nbytes = {len(BODY)}\n'
        f'[file."b.csv"]\nurl = ["{server.url}?b"]\n'
        f'[file."c.csv"]\nurl = ["{server.url}?c"]\n' + digest.format("a") + digest.format("b")
    )
    monkeypatch.setenv("KVCACHE_ROOT", str(tmp_path))
    return tmp_path


def test_command_records_what_was_unknown_and_then_verifies(server, project, capsys):
    raw = ["--raw", str(project / "raw")]
    assert module.main(raw) == 0
    printed = capsys.readouterr().out
    assert "a.csv" in printed
    assert "sha256 verified" in printed
    assert "sha256 recorded" in printed
    assert "c.csv" not in printed
    assert load_checksums() == {"b.csv": {"sha256": SHA, "bytes": len(BODY)}}
    assert module.main(raw) == 0
    assert "recorded" not in capsys.readouterr().out
    (project / "raw" / "b.csv").unlink()
    server.body = BODY[:-1] + b"9"
    assert module.main([*raw, "b.csv"]) == 1
    assert f"expected {SHA}" in capsys.readouterr().err


def test_digests_are_built_from_what_was_downloaded(server, project, capsys):
    server.script = ["truncate", "redirect"]
    assert module.main(["--raw", str(project / "raw"), "--timeout", "1"]) == 0
    assert digests_main(["build", "--raw", str(project / "raw")]) == 0
    output = load_digest("a")
    assert output.total == 4000
    assert output.tokens.tolist() == list(range(1, 4001))
    assert output.upper == 4000


def test_command_gets_what_it_can_and_names_the_rest(server, project, capsys):
    server.script = ["404"]
    assert module.main(["--raw", str(project / "raw")]) == 1
    out, err = capsys.readouterr()
    assert "b.csv" in out
    assert "1 of 2 files are missing: a.csv" in err


def test_command_refuses_unknown_names(project, capsys):
    with pytest.raises(SystemExit):
        module.main(["nothing.csv"])
    assert "there are a.csv, b.csv, c.csv" in capsys.readouterr().err


def test_recorded_checksums_are_sorted_and_kept(tmp_path):
    path = tmp_path / "checksums.toml"
    record_checksum("b", "2" * 64, 2, path)
    record_checksum("a", "1" * 64, 1, path)
    record_checksum("b", "3" * 64, 3, path)
    assert list(load_checksums(path)) == ["a", "b"]
    assert load_checksums(path)["b"] == {"sha256": "3" * 64, "bytes": 3}


def test_the_projects_own_list():
    names = [file.name for file in needed_files(load_sources())]
    assert "BurstGPT_1.csv" in names
    assert "servegen_windows.parquet" not in names
    every = needed_files(load_sources(), everything=True)
    assert {"BurstGPT_2.csv", "toolagent_trace.jsonl"} <= {file.name for file in every} - set(names)
    assert all(url.startswith("https://") for file in every for url in file.url)


def test_notes_of_a_partial_file_that_are_damaged_are_ignored(server, known, transfer, tmp_path):
    (tmp_path / ".trace.csv.part").write_bytes(BODY[:HALF])
    (tmp_path / ".trace.csv.part.json").write_text("{")
    assert download(known, tmp_path, transfer)[0].read_bytes() == BODY
    (tmp_path / "trace.csv").unlink()
    (tmp_path / ".trace.csv.part").write_bytes(BODY[:HALF])
    (tmp_path / ".trace.csv.part.json").write_text(json.dumps({"url": server.url, "validator": '"v0"'}))
    assert download(known, tmp_path, transfer)[0].read_bytes() == BODY
