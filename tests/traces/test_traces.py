"""Readers: every format, every way a file can be wrong, and round trips of generated traces."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvcache.traces.rows
from kvcache import TraceError, read_trace, reduce_trace
from kvcache.engine import JointLengths
from kvcache.traces import FORMATS, ReadReport, Trace, _Scan, mistral_token_counter

BURSTGPT_1 = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,276,693,API log
118,GPT-4,417,0,417,API log
"""
BURSTGPT_3 = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,a1,3.5,ChatGPT,472,18,490,Conversation log
45,,,ChatGPT,1087,230,1317,Conversation log
118,b2,2.0,GPT-4,417,276,693,API log
118,b2,1.0,GPT-4,417,0,417,API log
"""
AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319601,3180,8
2023-11-16 18:17:04.0781490,110,27
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2399,6
2024-05-10 00:00:00.017335+00:00,76,15
2024-05-10 00:00:00+00:00,2376,9
"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 0, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}
{"timestamp": 3000, "input_length": 7236, "output_length": 794, "hash_ids": [0, 28, 29, 30]}
"""
VIDUR = """\
,arrived_at,num_prefill_tokens,num_decode_tokens
0,0.25,100,20
1,1.75,50,7
"""
SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "one two three"},
            {"from": "gpt", "value": "four five"},
            {"from": "human", "value": "six"},
            {"from": "chatgpt", "value": "seven eight nine ten"},
        ],
    },
    {"id": "b", "conversations": []},
    {
        "id": "c",
        "conversations": [
            {"from": "system", "value": "be brief"},
            {"from": "bing", "value": "yes"},
            {"from": "bard", "value": ""},
            {"from": "user", "value": "thanks"},
        ],
    },
]


def words(text: str) -> int:
    return len(text.split())


@pytest.fixture
def write(tmp_path):
    def to_file(content: str | bytes, name: str = "trace") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return to_file


def rows(trace: Trace, *columns: str) -> list[tuple]:
    table = trace.requests[list(columns or ("arrival_s", "input_tokens", "output_tokens", "class"))]
    return [tuple(row) for row in table.astype(object).itertuples(index=False)]


# ---- formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [BURSTGPT_1, BURSTGPT_3], ids=["without session", "with session"])
def test_burstgpt(write, text):
    trace = read_trace(write(text))
    assert trace.report.format == "burstgpt"
    assert rows(trace) == [
        (0.0, 472, 18, "ChatGPT/Conversation log"),
        (40.0, 1087, 230, "ChatGPT/Conversation log"),
        (113.0, 417, 276, "GPT-4/API log"),
    ]
    assert trace.report.rows_read == 4
    assert trace.report.dropped == {"0 output tokens": 1}
    assert trace.report.classes == ("ChatGPT/Conversation log", "GPT-4/API log")


def test_azure_2023_has_seven_decimals_and_no_zone(write):
    trace = read_trace(write(AZURE_2023))
    assert trace.report.format == "azure-2023"
    np.testing.assert_allclose(trace.requests["arrival_s"], [0, 0.0520001, 0.098189], rtol=0, atol=1e-12)
    assert rows(trace, "input_tokens", "output_tokens", "class") == [
        (4808, 10, "all"),
        (3180, 8, "all"),
        (110, 27, "all"),
    ]


def test_azure_2024_is_sorted_and_the_disorder_counted(write):
    trace = read_trace(write(AZURE_2024))
    assert trace.report.format == "azure-2024"
    assert trace.report.out_of_order == 1
    np.testing.assert_allclose(trace.requests["arrival_s"], [0, 0.00993, 0.017335], rtol=0, atol=1e-12)
    assert trace.requests["output_tokens"].tolist() == [9, 6, 15]


def test_offsets_are_converted_to_one_clock(write):
    text = AZURE_2024.replace("2024-05-10 00:00:00.017335+00:00", "2024-05-10T02:00:00.017335+02:00")
    np.testing.assert_allclose(
        read_trace(write(text)).requests["arrival_s"], [0, 0.00993, 0.017335], atol=1e-12
    )


def test_mooncake(write):
    trace = read_trace(write(MOONCAKE))
    assert trace.report.format == "mooncake"
    assert rows(trace) == [(0.0, 6758, 500, "all"), (0.0, 7322, 490, "all"), (3.0, 7236, 794, "all")]
    assert [blocks.tolist() for blocks in trace.requests["prefix_blocks"]] == [
        [0, 1, 2],
        [0, 14],
        [0, 28, 29, 30],
    ]


def test_vidur(write):
    trace = read_trace(write(VIDUR))
    assert trace.report.format == "vidur"
    assert rows(trace) == [(0.0, 100, 20, "all"), (1.5, 50, 7, "all")]


def test_sharegpt_counts_each_response_and_all_text_before_it(write):
    trace = read_trace(write(json.dumps(SHAREGPT)), token_counter=words)
    assert trace.report.format == "sharegpt"
    assert rows(trace, "input_tokens", "output_tokens", "class") == [
        (3, 2, "gpt"),
        (6, 4, "chatgpt"),
        (2, 1, "bing"),
    ]
    assert trace.requests["arrival_s"].isna().all()
    assert trace.report.dropped == {"0 output tokens": 1}


def test_sharegpt_streams(write, monkeypatch):
    monkeypatch.setattr(kvcache.traces.rows, "_PYTHON_ROWS", 4)
    path = write(json.dumps(SHAREGPT * 10))
    chunks = list(_Scan(path, token_counter=words).chunks())
    assert [chunk.outputs.size for chunk in chunks] == [3] * 10
    assert sum(chunk.outputs.sum() for chunk in chunks) == 70


def test_known_formats_can_be_named(write):
    for name, text in (("burstgpt", BURSTGPT_1), ("azure-2023", AZURE_2023), ("azure-2024", AZURE_2024)):
        assert read_trace(write(text), format=name).report.format == name
    assert read_trace(write(MOONCAKE), format="mooncake", prefix_blocks=None).requests.columns.tolist() == [
        "arrival_s",
        "input_tokens",
        "output_tokens",
        "class",
    ]


def test_a_column_of_a_known_format_can_be_replaced(write):
    trace = read_trace(write(BURSTGPT_1), class_="Model")
    assert trace.report.format == "burstgpt"
    assert trace.report.classes == ("ChatGPT", "GPT-4")
    assert read_trace(write(BURSTGPT_1), class_=None).report.classes == ("all",)


def test_any_csv_with_a_mapping(write):
    path = write("when,app,prompt,gen\n1.5,chat,10,20\n2.5,code,30,40\n")
    trace = read_trace(path, arrival_s="when", input_tokens="prompt", output_tokens="gen", class_="app")
    assert rows(trace) == [(0.0, 10, 20, "chat"), (1.0, 30, 40, "code")]
    pair = read_trace(
        path, arrival_s=None, input_tokens="prompt", output_tokens="gen", class_=("app", "when")
    )
    assert pair.report.classes == ("chat/1.5", "code/2.5")
    assert pair.requests["arrival_s"].isna().all()


def test_any_jsonl_with_a_mapping(write):
    lines = [{"t": "2024-01-01T00:00:01Z", "i": 1, "o": 2.0}, {"t": "2024-01-01T00:00:02Z", "i": "3", "o": 4}]
    path = write("\n".join(json.dumps(line) for line in lines))
    trace = read_trace(path, arrival_s="t", input_tokens="i", output_tokens="o")
    assert rows(trace) == [(0.0, 1, 2, "all"), (1.0, 3, 4, "all")]


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_any_parquet_with_a_mapping(tmp_path, zone):
    table = pa.table(
        {
            "t": pa.array([1_000_000, 3_000_000], pa.timestamp("us", zone)),
            "i": pa.array([1, 2], pa.uint16()),
            "o": pa.array([3.0, 4.0], pa.float32()),
            "c": pa.array(["x", "y"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    trace = read_trace(tmp_path / "t.parquet", arrival_s="t", input_tokens="i", output_tokens="o", class_="c")
    assert rows(trace) == [(0.0, 1, 3, "x"), (2.0, 2, 4, "y")]


def test_units_of_numeric_arrivals(write):
    path = write("arrival_s,input_tokens,output_tokens\n1000,1,1\n3000,1,1\n")
    for unit, seconds in (("s", 2000.0), ("ms", 2.0), ("us", 2e-3), ("ns", 2e-6)):
        assert read_trace(path, unit=unit).requests["arrival_s"].tolist() == pytest.approx([0, seconds])


def test_a_tidy_table_reads_back(write, tmp_path):
    trace = read_trace(write(BURSTGPT_1))
    trace.requests.to_csv(tmp_path / "tidy.csv", index=False)
    trace.requests.to_parquet(tmp_path / "tidy.parquet")
    trace.requests.to_json(tmp_path / "tidy.jsonl", orient="records", lines=True)
    for name in ("tidy.csv", "tidy.parquet", "tidy.jsonl"):
        assert rows(read_trace(tmp_path / name)) == rows(trace)


# ---- packing, marks, quotes, blank lines -------------------------------------------------------------


@pytest.mark.parametrize(
    "pack", [gzip.compress, zstandard.compress, lambda b: gzip.compress(b[:90]) + gzip.compress(b[90:])]
)
@pytest.mark.parametrize("text", [BURSTGPT_1, MOONCAKE], ids=["csv", "jsonl"])
def test_packed_files_whatever_their_name(write, pack, text):
    plain, packed = read_trace(write(text, "plain")), read_trace(write(pack(text.encode()), "packed.txt"))
    assert rows(packed) == rows(plain)


@pytest.mark.parametrize("text", [BURSTGPT_1, AZURE_2024, MOONCAKE, json.dumps(SHAREGPT)])
def test_byte_order_mark_and_windows_line_ends(write, text):
    plain = read_trace(write(text), token_counter=words)
    marked = read_trace(write(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()), token_counter=words)
    pd.testing.assert_frame_equal(marked.requests, plain.requests)


def test_quotes_blank_lines_unicode_and_spaces(write):
    path = write(
        '\n\narrival_s,class,input_tokens,output_tokens\n\n0,"a, ""b""\nc", 1 ,2\n\n\n1,Ünïcode 漢字,3.0,+4\n'
    )
    assert rows(read_trace(path)) == [(0.0, 1, 2, 'a, "b"\nc'), (1.0, 3, 4, "Ünïcode 漢字")]
    with pytest.raises(TraceError, match="row 2: output_tokens is -4; expected >= 0"):
        read_trace(write(path.read_bytes().replace(b"+4", b"-4")))


def test_unsorted_arrivals_keep_ties_in_the_order_of_the_file(write):
    arrivals = [5, 1, 3, 1, 5, 1]
    path = write(
        "arrival_s,input_tokens,output_tokens\n" + "".join(f"{t},0,{i + 1}\n" for i, t in enumerate(arrivals))
    )
    trace = read_trace(path)
    assert trace.requests["arrival_s"].tolist() == [0, 0, 0, 2, 4, 4]
    assert trace.requests["output_tokens"].tolist() == [2, 4, 6, 3, 1, 5]
    assert trace.report.out_of_order == 4


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(1, 20), st.integers(0, 10))
@settings(max_examples=150, deadline=None)
def test_table_is_sorted_stably_however_it_is_chunked(arrivals, size, little):
    from kvcache.traces import _Table
    from kvcache.traces.rows import Chunk

    table = _Table()
    table._LITTLE = little
    for begin in range(0, len(arrivals), size):
        part = np.array(arrivals[begin : begin + size], np.float64)
        number = np.arange(begin, begin + part.size, dtype=np.int32)
        blocks = [np.array([i]) for i in number]
        table.append(Chunk(part, number, number + 1, number % 3, blocks))
    frame = table.frame(("a", "b", "c"))
    order = np.argsort(arrivals, kind="stable")
    assert frame["input_tokens"].tolist() == order.tolist()
    assert frame["output_tokens"].tolist() == (order + 1).tolist()
    assert [int(b[0]) for b in frame["prefix_blocks"]] == order.tolist()
    assert frame["arrival_s"].tolist() == (np.sort(arrivals) - min(arrivals)).tolist()
    assert frame["class"].tolist() == [("a", "b", "c")[i % 3] for i in order]


def test_more_classes_than_a_byte_holds(write):
    text = "arrival_s,class,input_tokens,output_tokens\n" + "".join(f"{i},c{i},1,1\n" for i in range(300))
    trace = read_trace(write(text))
    assert trace.requests["class"].tolist() == [f"c{i}" for i in range(300)]


# ---- what is wrong with a file -----------------------------------------------------------------------


def azure(*lines: str) -> str:
    return "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n"


GOOD = "2023-11-16 18:17:03.9799600,4808,10"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "trace: empty file; expected requests"),
        (b"\n \r\n", "trace: only blank lines; expected requests"),
        (b"\xef\xbb\xbf", "trace: empty file; expected requests"),
        (gzip.compress(b"", mtime=0), "trace: empty file; expected requests"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "trace: no rows; expected at least one request"),
        (b"PK\x03\x04rest", "trace: a zip archive; expected CSV"),
        (b"\x00\x01\x02\x03", "trace: binary data; expected CSV"),
        ("a,b\n1,2\n".encode("utf-16"), "trace: UTF-16 text; expected UTF-8"),
        (b"\xe9t\xe9,b\n1,2\n", "trace: its first line is no UTF-8; expected UTF-8 text"),
        (
            b"<html><body>404</body></html>",
            "trace: columns '<html><body>404</body></html>' fit none of burstgpt",
        ),
        (b"a,b\n1,2\n", "columns 'a', 'b' fit none of burstgpt, azure-2023"),
        (b"{'a': 1}\n", "trace row 1: no JSON"),
        (b"[1, 2]", "trace row 1: a JSON int; expected an object"),
        (b'[{"a": 1}]', "trace: columns 'a' fit none of burstgpt"),
        (b'[{"conversations": [{"from": "gpt"}]}]', "trace conversation 1: a turn without text"),
        (b'[{"conversations": []}, {"conver', "trace conversation 2: no JSON"),
        (b"PAR1 and no more", "trace: .*[Pp]arquet"),
        (azure(GOOD, GOOD.replace(",10", ",-3")), "trace row 2: GeneratedTokens is -3; expected >= 0"),
        (
            azure(GOOD, GOOD.replace(",10", ",2.5")),
            "trace row 2: GeneratedTokens is 2.5; expected a whole number",
        ),
        (
            azure(GOOD, GOOD.replace(",10", ",ten")),
            "trace row 2: GeneratedTokens is 'ten'; expected a whole number",
        ),
        (
            azure(GOOD, GOOD.replace(",10", ",")),
            "trace row 2: GeneratedTokens is empty; expected a whole number",
        ),
        (azure(GOOD, GOOD.replace(",10", ",nan")), "trace row 2: GeneratedTokens is 'nan'; expected a whole"),
        (
            azure(GOOD, GOOD.replace(",10", ",3000000000")),
            "row 2: GeneratedTokens is 3000000000; expected <= 2147",
        ),
        (
            azure(GOOD, GOOD.replace("4808", "1_000")),
            "trace row 2: ContextTokens is '1_000'; expected a whole",
        ),
        (azure(GOOD, "2023-11-16 18:17:03.9799600,4808"), "trace row 2: 2 columns; expected 3"),
        (azure(GOOD, GOOD + ",1", GOOD), "trace row 2: 4 columns; expected 3"),
        (
            azure(GOOD, "yesterday,1,1"),
            "trace row 2: TIMESTAMP is 'yesterday'; expected a date without a zone",
        ),
        (
            azure(GOOD, "2023-02-30 00:00:00,1,1"),
            "row 2: TIMESTAMP is '2023-02-30 00:00:00'; expected a date",
        ),
        (
            azure(GOOD, "1850-01-01 00:00:00,1,1"),
            "row 2: TIMESTAMP is '1850-01-01 00:00:00'; expected a date within",
        ),
        (
            azure(GOOD, "2024-05-10 00:00:00.0+00:00,1,1"),
            r"row 2: TIMESTAMP is '2024-.*', which has a zone; expected a date without a zone",
        ),
        (
            azure("2024-05-10 00:00:00.0+00:00,1,1", GOOD),
            r"row 2: TIMESTAMP is '2023-.*', which has no zone; expected a date with a zone",
        ),
        (BURSTGPT_1.replace("\n45,", "\n,"), "trace row 2: Timestamp is empty; expected a number"),
        (BURSTGPT_1.replace("\n45,", "\ninf,"), "trace row 2: Timestamp is 'inf'; expected a number"),
        (BURSTGPT_1.encode() + b"200,Chat\xff,1,1,2,API log\n", "trace row 5: Model is no UTF-8"),
        (MOONCAKE + '{"timestamp": 1}\n', "trace row 4: no 'input_length'; found 'timestamp'"),
        (MOONCAKE + "[1]\n", "trace row 4: a JSON list; expected an object"),
        (
            MOONCAKE.replace("[0, 14]", "[0, 1.5]"),
            "trace row 2: hash_ids is .*; expected a list of whole numbers",
        ),
        (MOONCAKE.replace("490", "true"), "trace row 2: output_length is 'true'; expected a whole number"),
        (MOONCAKE.replace("490", "null"), "trace row 2: output_length is empty; expected a whole number"),
        (MOONCAKE.replace("490", "[]"), "trace row 2: output_length is a JSON list; expected a number"),
        (
            "TIMESTAMP,TIMESTAMP,ContextTokens,GeneratedTokens\n1,1,1,1\n",
            "'TIMESTAMP' occurs 2 times; expected once",
        ),
    ],
)
def test_a_wrong_file_says_what_where_and_what_was_expected(write, content, message):
    with pytest.raises(TraceError, match=message):
        read_trace(write(content), token_counter=words)


def test_files_that_are_none(tmp_path):
    with pytest.raises(TraceError, match=r"missing\.csv: no such file"):
        read_trace(tmp_path / "missing.csv")
    with pytest.raises(TraceError, match="a folder; expected a file"):
        read_trace(tmp_path)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("text", [AZURE_2023, MOONCAKE, json.dumps(SHAREGPT)], ids=["csv", "jsonl", "json"])
def test_a_truncated_packed_file_is_refused(write, pack, text):
    packed = pack(text.encode())
    with pytest.raises(TraceError, match=r"trace: the compressed file ends too early"):
        read_trace(write(packed[: len(packed) * 2 // 3]), token_counter=words)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_file_truncated_far_behind_its_head_is_refused(write, pack):
    numbers = np.random.default_rng(1).integers(1, 10**9, (60_000, 2)).tolist()
    packed = pack(azure(*(f"2023-11-16 18:17:04,{i},{o}" for i, o in numbers)).encode())
    with pytest.raises(TraceError, match=r"trace.*: the compressed file ends too early"):
        read_trace(write(packed[: len(packed) * 2 // 3]))


@pytest.mark.parametrize("format", [name for name in FORMATS if name not in ("azure-2023", "sharegpt")])
def test_the_wrong_format_by_name(write, format):
    with pytest.raises(TraceError, match=r"trace( row 1)?: "):
        read_trace(write(AZURE_2023), format=format)
    with pytest.raises(TraceError, match="format 'sharegpt' expects a JSON array"):
        read_trace(write(AZURE_2023), format="sharegpt")


def test_missing_column_lists_what_is_there(write):
    with pytest.raises(TraceError, match="no column 'gen'; found 'when', 'prompt'"):
        read_trace(write("when,prompt\n1,2\n"), arrival_s="when", input_tokens="prompt", output_tokens="gen")


def test_parquet_of_wrong_types(tmp_path):
    for column, message in (
        (pa.array([[1], [2]]), "row 1: output_tokens is a JSON list; expected a number"),
        (pa.array([True, False]), "row 1: output_tokens is True; expected a whole number"),
        (pa.array([1, None]), "row 2: output_tokens is empty; expected a whole number"),
        (pa.array([1, 2**40]), "row 2: output_tokens is 1099511627776; expected <= 2147483647"),
    ):
        table = pa.table({"arrival_s": [0.0, 1.0], "input_tokens": [1, 1], "output_tokens": column})
        pq.write_table(table, tmp_path / "t.parquet")
        with pytest.raises(TraceError, match=message):
            read_trace(tmp_path / "t.parquet")


def test_wrong_calls(write):
    path = write(AZURE_2023)
    with pytest.raises(ValueError, match="format: 'azur'; expected one of 'auto', 'burstgpt'"):
        read_trace(path, format="azur")
    with pytest.raises(TypeError, match="unknown keyword 'output'; columns are named by arrival_s"):
        read_trace(path, output="x")
    with pytest.raises(TypeError, match="output_tokens: None"):
        read_trace(path, output_tokens=None)
    with pytest.raises(TypeError, match="a ShareGPT file has no columns"):
        read_trace(write(json.dumps(SHAREGPT)), arrival_s="x")
    with pytest.raises(ValueError, match="unit: 'h'"):
        read_trace(path, unit="h")
    with pytest.raises(ValueError, match="invalid: 'skip'"):
        read_trace(path, invalid="skip")
    with pytest.raises(TraceError, match="no arrival times"):
        reduce_trace(write(json.dumps(SHAREGPT)), window_s=60, token_counter=words)


def test_bad_rows_can_be_dropped_and_are_counted(write):
    text = azure(
        GOOD, GOOD.replace(",10", ",-3"), GOOD.replace("4808", "x").replace(",10", ",y"), "1,2", GOOD
    )
    text += "tomorrow,1,1\n" + GOOD.replace(",10", ",0")
    report = read_trace(write(text), invalid="drop").report
    assert (report.rows_read, report.rows_kept) == (7, 2)
    assert report.dropped == {
        "0 output tokens": 1,
        "bad arrival_s": 1,
        "bad input_tokens": 1,
        "bad output_tokens": 1,
        "misshapen row": 1,
    }
    torn = text.encode() + b"\n\xff,\xff\n\xff,1,1\n"
    report = read_trace(write(torn), invalid="drop").report
    assert (report.rows_read, report.rows_kept) == (9, 2)
    assert (report.dropped["bad arrival_s"], report.dropped["misshapen row"]) == (2, 2)
    text = MOONCAKE + "{}\n" + MOONCAKE.replace("hash_ids", "hash") + "not JSON"
    report = read_trace(write(text), invalid="drop").report
    assert (report.rows_read, report.rows_kept, report.dropped) == (8, 3, {"misshapen row": 5})
    broken = [*SHAREGPT, {"conversations": None}]
    report = read_trace(write(json.dumps(broken)), invalid="drop", token_counter=words).report
    assert (report.rows_read, report.rows_kept) == (5, 3)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("bad_row", [1, 7, 5_000, 12_345, 20_000])
def test_row_numbers_are_right_in_every_chunk(tmp_path, monkeypatch, kind, bad_row):
    monkeypatch.setattr(kvcache.traces.rows, "_BLOCK_BYTES", 4096)
    monkeypatch.setattr(kvcache.traces.rows, "_PYTHON_ROWS", 999)
    monkeypatch.setattr(kvcache.traces.rows, "_PARQUET_ROWS", 999)
    n = 20_000
    outputs = np.arange(1, n + 1)
    outputs[bad_row - 1] = -3
    table = pd.DataFrame({"arrival_s": np.arange(n) * 0.5, "input_tokens": 1, "output_tokens": outputs})
    path = tmp_path / "t"
    if kind == "csv":
        blank = io.StringIO()
        table.to_csv(blank, index=False)
        path.write_text(blank.getvalue().replace("\n", "\n\n"))
    elif kind == "jsonl":
        table.to_json(path, orient="records", lines=True)
    else:
        table.to_parquet(path)
    with pytest.raises(TraceError, match=f"t row {bad_row}: output_tokens is -3; expected >= 0"):
        read_trace(path)
    if kind == "csv":
        lines = path.read_text().split("\n\n")
        lines[bad_row] += ",9"
        path.write_text("\n\n".join(lines).replace("-3", "3"))
        with pytest.raises(TraceError, match=f"t row {bad_row}: 4 columns; expected 3"):
            read_trace(path)


# ---- scanning and reducing ------------------------------------------------------------------------


def test_reduced_counts_are_those_of_the_table(write, monkeypatch):
    monkeypatch.setattr(kvcache.traces.rows, "_BLOCK_BYTES", 4096)
    monkeypatch.setattr("kvcache.traces._ROWS_AT_ONCE", 700)
    rng = np.random.default_rng(7)
    n = 3_000
    table = pd.DataFrame(
        {
            "arrival_s": 50.0 + rng.permutation(n),
            "class": rng.choice(["a", "b"], n),
            "input_tokens": rng.integers(0, 20, n),
            "output_tokens": rng.integers(0, 20, n),
        }
    )
    at = int(np.flatnonzero(table["arrival_s"] == 737.0)[0])
    table.loc[[0, at], "arrival_s"] = table.loc[[at, 0], "arrival_s"].to_numpy()
    path = write(table.to_csv(index=False))
    counts, report = reduce_trace(path, window_s=500, align_s=100, until_s=2_000)
    first = np.floor(table["arrival_s"].iloc[0] / 100) * 100
    kept = table[(table["output_tokens"] > 0) & (table["arrival_s"] < first + 2_000)]
    slot = np.floor((kept["arrival_s"] - first) / 500).astype(int)
    expected = pd.concat(
        [
            pd.DataFrame(
                {"class": kept["class"], "window": slot - slot.min(), "field": name, "tokens": kept[column]}
            )
            for name, column in (("input", "input_tokens"), ("output", "output_tokens"))
        ]
    )
    expected = expected.value_counts(sort=False).sort_index().rename("requests").reset_index()
    pd.testing.assert_frame_equal(counts, expected, check_dtype=False)
    assert report.rows_kept == len(kept)
    assert report.rows_read == n == report.rows_kept + sum(report.dropped.values())
    assert (
        report.dropped["after the period"]
        == ((table["arrival_s"] >= first + 2_000) & (table["output_tokens"] > 0)).sum()
    )


@pytest.mark.parametrize("bucket", [0.0, 0.05, 0.5])
def test_pairs_are_those_of_the_table(write, monkeypatch, bucket):
    monkeypatch.setattr(kvcache.traces.rows, "_BLOCK_BYTES", 4096)
    monkeypatch.setattr("kvcache.traces._ROWS_AT_ONCE", 700)
    rng = np.random.default_rng(3)
    n = 3_000
    table = pd.DataFrame(
        {
            "arrival_s": np.arange(n) * 0.5,
            "class": rng.choice(["a", "b"], n),
            "input_tokens": rng.integers(0, 40, n),
            "output_tokens": rng.integers(1, 2_000, n),
        }
    )
    pairs, report = reduce_trace(write(table.to_csv(index=False)), window_s=500, joint=True, bucket=bucket)
    assert report.rows_kept == n == pairs["requests"].sum()
    assert pairs.columns.tolist() == ["class", "window", "input", "output", "requests"]
    assert not pairs.duplicated(["class", "window", "input", "output"]).any()
    if not bucket:
        keys = [table["class"], (table["arrival_s"] // 500).astype(int).rename("window")]
        expected = table.groupby([*keys, "input_tokens", "output_tokens"]).size().reset_index(name="requests")
        expected.columns = pairs.columns
        pd.testing.assert_frame_equal(pairs, expected, check_dtype=False)
    for (name, window), part in pairs.groupby(["class", "window"]):
        own = table[(table["class"] == name) & (table["arrival_s"] // 500 == window)]
        for field, column in (("input", "input_tokens"), ("output", "output_tokens")):
            mean = np.average(part[field], weights=part["requests"])
            assert mean == pytest.approx(own[column].mean(), abs=0.5 if bucket else 1e-9)
            assert part[field].between(own[column].min(), own[column].max()).all()
        law = JointLengths.from_counts(part["input"], part["output"], part["requests"])
        if bucket:  # the same buckets as those of the law itself
            exact = JointLengths.from_samples(own["input_tokens"], own["output_tokens"]).bucketed(bucket)
            assert law.inputs.tolist() == exact.inputs.tolist()
            assert law.weights.tolist() == exact.weights.tolist()
    with pytest.raises(ValueError, match="bucket: 1; expected a width"):
        reduce_trace(write("x"), bucket=1)


def test_windows_of_dates_align_to_midnight(write):
    path = write(azure("2023-11-16 23:59:59.5,1,1", "2023-11-17 00:00:00.0,1,2", "2023-11-18 12:00:00,1,3"))
    counts, _ = reduce_trace(path, window_s=86_400, align_s=86_400)
    assert counts.query("field == 'output'")[["window", "tokens"]].values.tolist() == [[0, 1], [1, 2], [2, 3]]
    counts, _ = reduce_trace(path, window_s=86_400)
    assert counts.query("field == 'output'")[["window", "tokens"]].values.tolist() == [[0, 1], [0, 2], [1, 3]]


def test_a_reduction_without_requests_is_refused(write):
    with pytest.raises(TraceError, match="no requests are left"):
        reduce_trace(write(azure(GOOD.replace(",10", ",0"))))


# ---- results ----------------------------------------------------------------------------------------


def test_looks(write):
    trace = read_trace(write(BURSTGPT_1, "week.csv"))
    assert repr(trace) == (
        "Trace(week.csv [burstgpt]: 4 rows read, 3 kept, 1 dropped (0 output tokens); arrivals in s (as this "
        "format is documented; 0.0177 requests/s, whole numbers))"
    )
    assert repr(read_trace(write(AZURE_2024, "az.csv")).report) == (
        "az.csv [azure-2024]: 3 rows read, 3 kept, none dropped, 1 out of order; "
        "arrivals as dates (year first)"
    )
    page = trace._repr_html_()
    assert "<caption>week.csv</caption>" in page
    assert "<th>dropped: 0 output tokens</th><td>1</td>" in page
    escaped = ReadReport("<b>", "csv", 1, 1, {}, 0, ("<i>",))._repr_html_()
    assert "<b>" not in escaped
    assert "&lt;i&gt;" in escaped
    with pytest.raises(AttributeError):
        trace.requests = None


def test_progress_goes_to_stderr_when_asked_for(write, capsys):
    read_trace(write(BURSTGPT_1, "week.csv"))
    assert capsys.readouterr().err == ""
    read_trace(write(BURSTGPT_1, "week.csv"), progress=True)
    assert "week.csv: 4.00 rows" in capsys.readouterr().err


def test_columns_are_compact(write):
    dtypes = read_trace(write(AZURE_2024)).requests.dtypes
    assert dtypes["arrival_s"] == np.float64
    assert dtypes["input_tokens"] == dtypes["output_tokens"] == np.int32
    assert dtypes["class"] == "category"


def test_without_the_extra_the_error_tells_how_to_get_it(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ImportError, match=r"pip install '.\[tokenizer\]'.*token_counter="):
        mistral_token_counter()
    with pytest.raises(ImportError, match="token_counter="):
        read_trace(write(json.dumps(SHAREGPT)))


def test_the_extra_counts_as_mistral_does(write):
    pytest.importorskip("sentencepiece")
    pytest.importorskip("mistral_common")
    count = mistral_token_counter()
    assert count("Hello world") == 2
    assert count("a" * 7) < 7
    assert read_trace(write(json.dumps(SHAREGPT))).requests["output_tokens"].tolist() == [
        count("four five"),
        count("seven eight nine ten"),
        count("yes"),
    ]


# ---- properties ---------------------------------------------------------------------------------------

TOKENS = st.integers(0, 2**31 - 1)
LABELS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
STAMPS = st.integers(0, 10**16).map(lambda ticks: ticks * 100)


def as_date(nanoseconds: int, zone: str) -> str:
    return str(np.datetime64(nanoseconds, "ns")).replace("T", " ")[:-2] + zone


def table_as_csv(header: list[str], lines: list[list]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow(header)
    writer.writerows(lines)
    return text.getvalue().encode()


@st.composite
def generated(draw):
    """(format, bytes, keyword arguments, rows as (seconds on the file's clock, input, output, class))."""
    format = draw(
        st.sampled_from(["azure-2023", "azure-2024", "burstgpt", "vidur", "mooncake", "csv", "jsonl"])
    )
    n = draw(st.integers(1, 12))
    inputs, outputs = (draw(st.lists(TOKENS, min_size=n, max_size=n)) for _ in range(2))
    outputs = [value if draw(st.booleans()) else 0 for value in outputs[:-1]] + [max(outputs[-1], 1)]
    labels = ["all"] * n
    if format.startswith("azure"):
        zone = "+00:00" if format == "azure-2024" else ""
        times = draw(st.lists(STAMPS, min_size=n, max_size=n))
        lines = [[as_date(t, zone), i, o] for t, i, o in zip(times, inputs, outputs, strict=True)]
        data = table_as_csv(["TIMESTAMP", "ContextTokens", "GeneratedTokens"], lines)
        seconds = [t / 1e9 for t in times]
    else:
        seconds = draw(st.lists(st.integers(0, 10**9), min_size=n, max_size=n))
        if format == "burstgpt":
            models, logs = (draw(st.lists(LABELS, min_size=n, max_size=n)) for _ in range(2))
            labels = [f"{m}/{g}" for m, g in zip(models, logs, strict=True)]
            header = ["Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"]
            lines = list(zip(seconds, models, inputs, outputs, [0] * n, logs, strict=True))
            data = table_as_csv(header, lines)
        elif format == "vidur":
            header = ["arrived_at", "num_prefill_tokens", "num_decode_tokens"]
            data = table_as_csv(header, list(zip(seconds, inputs, outputs, strict=True)))
        elif format == "csv":
            labels = draw(st.lists(LABELS, min_size=n, max_size=n))
            header = ["output_tokens", "class", "arrival_s", "input_tokens"]
            data = table_as_csv(header, list(zip(outputs, labels, seconds, inputs, strict=True)))
        else:
            names = (
                ("timestamp", "input_length", "output_length")
                if format == "mooncake"
                else (
                    "arrival_s",
                    "input_tokens",
                    "output_tokens",
                )
            )
            records = [
                dict(zip(names, row, strict=True)) for row in zip(seconds, inputs, outputs, strict=True)
            ]
            if format == "mooncake":
                records = [{**record, "hash_ids": [i, -i]} for i, record in enumerate(records)]
                seconds = [s / 1000 for s in seconds]
            data = "\n".join(map(json.dumps, records)).encode()
    return format, data, list(zip(seconds, inputs, outputs, labels, strict=True))


@given(
    generated(), st.sampled_from([bytes, gzip.compress, zstandard.compress]), st.sampled_from([64, 1 << 20])
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_generated_traces_round_trip(tmp_path, case, pack, block):
    format, data, expected = case
    (tmp_path / "t").write_bytes(pack(data))
    kept = [row for row in expected if row[2] > 0]
    order = sorted(range(len(kept)), key=lambda i: (kept[i][0], i))
    longest = max(len(line) for line in data.split(b"\n")) + 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvcache.traces.rows, "_BLOCK_BYTES", max(block, 2 * longest))
        patch.setattr(kvcache.traces.rows, "_PYTHON_ROWS", 3)
        # Times at random have any rate, which tells no unit.
        trace = read_trace(tmp_path / "t", unit="ms" if format == "mooncake" else "s")
    assert trace.report.format == format
    assert trace.report.rows_read == len(expected)
    assert trace.report.rows_kept == len(kept) == len(trace.requests)
    found = trace.requests
    assert found["input_tokens"].tolist() == [kept[i][1] for i in order]
    assert found["output_tokens"].tolist() == [kept[i][2] for i in order]
    assert found["class"].tolist() == [kept[i][3] for i in order]
    start = kept[order[0]][0] if kept else 0
    np.testing.assert_allclose(found["arrival_s"], [kept[i][0] - start for i in order], rtol=1e-12, atol=1e-6)


SEEDS = [
    text.encode()
    for text in (BURSTGPT_1, BURSTGPT_3, AZURE_2023, AZURE_2024, MOONCAKE, VIDUR, json.dumps(SHAREGPT))
]


@st.composite
def damaged(draw):
    """Arbitrary bytes, or a good file with some bytes overwritten, inserted or cut."""
    data = bytearray(draw(st.sampled_from(SEEDS) | st.binary(max_size=200)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        piece = draw(
            st.binary(max_size=4) | st.sampled_from([b"\n", b",", b'"', b"\r", b"\\ud800", b"1e999", b"{"])
        )
        data[at : at + draw(st.integers(0, 6))] = piece
    pack = draw(st.sampled_from([bytes, bytes, gzip.compress, zstandard.compress]))
    packed = pack(bytes(data))
    return packed[: draw(st.integers(0, len(packed)))] if draw(st.booleans()) else packed


@given(damaged(), st.sampled_from(["auto", *FORMATS]), st.sampled_from(["raise", "drop"]))
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arbitrary_bytes_give_a_trace_or_a_trace_error(tmp_path, data, format, invalid):
    (tmp_path / "t").write_bytes(data)
    try:
        trace = read_trace(tmp_path / "t", format=format, invalid=invalid, token_counter=words)
    except TraceError:
        return
    report = trace.report
    assert report.rows_read == report.rows_kept + sum(report.dropped.values())
    assert len(trace.requests) == report.rows_kept
    assert (trace.requests["output_tokens"] > 0).all()
    assert (trace.requests["input_tokens"] >= 0).all()


@given(st.binary(max_size=8), st.integers(0, 2000))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_parquet_gives_a_trace_or_a_trace_error(tmp_path, piece, at):
    table = pa.table({"arrival_s": [0.0, 1.0], "input_tokens": [1, 2], "output_tokens": [3, 4]})
    pq.write_table(table, tmp_path / "t", compression="none")
    data = bytearray((tmp_path / "t").read_bytes())
    at %= len(data)
    data[at : at + len(piece)] = piece
    (tmp_path / "t").write_bytes(data)
    with suppress(TraceError):
        assert isinstance(read_trace(tmp_path / "t"), Trace)


# ---- the originals, where they are at hand ---------------------------------------------------------------

RAW = os.environ.get("KVCACHE_RAW")


@pytest.mark.skipif(RAW is None, reason="KVCACHE_RAW names no folder of raw traces")
@pytest.mark.parametrize(
    ("name", "format", "kept", "dropped", "mean"),
    [
        ("burstgpt_first_week.csv.gz", "burstgpt", 17_893, 1_538, 264.42),
        ("azure_2023_code.csv.gz", "azure-2023", 8_819, 0, 27.88),
        ("azure_2023_conv.csv.gz", "azure-2023", 19_366, 0, 211.13),
        ("mooncake_conversation.jsonl.gz", "mooncake", 12_031, 0, 342.62),
    ],
)
def test_originals(name, format, kept, dropped, mean):
    trace = read_trace(Path(RAW) / name)
    assert trace.report.format == format
    assert trace.report.rows_kept == kept
    assert sum(trace.report.dropped.values()) == dropped
    assert trace.requests["output_tokens"].mean() == pytest.approx(mean, abs=0.005)
