"""What people bring: every layout in every container, the units of its times, and advice that helps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache import TraceError, read_trace
from kvcache.traces import Trace

TIDY = "arrival_s,input_tokens,output_tokens\n"


def words(text: str) -> int:
    return len(text.split())


@pytest.fixture
def read(tmp_path):
    def from_content(content: str | bytes | pa.Table, **options) -> Trace:
        path = tmp_path / "trace"
        if isinstance(content, pa.Table):
            pq.write_table(content, path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return read_trace(path, token_counter=words, **options)

    return from_content


def rows(trace: Trace) -> list[tuple]:
    table = trace.requests[["arrival_s", "input_tokens", "output_tokens"]]
    return [tuple(row) for row in table.astype(object).where(table.notna(), None).itertuples(index=False)]


def lines(*records: dict) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


# ---- layouts --------------------------------------------------------------------------------------

MOONCAKE = [
    {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]},
    {"timestamp": 1000, "input_length": 700, "output_length": 4, "hash_ids": [0, 2]},
]
BAILIAN = [
    {
        "chat_id": n,
        "parent_chat_id": -1,
        "timestamp": at,
        "input_length": length,
        "output_length": 9,
        "type": kind,
        "turn": 1,
        "hash_ids": ids,
    }
    for n, (at, length, kind, ids) in enumerate(
        [(0.0, 40, "text", [0, 1, 2]), (30.5, 60, "text", [0, 1, 2, 3]), (60.0, 48, "search", [0, 1, 9])]
    )
]
AIPERF = [
    {
        "metadata": {"request_start_ns": 1_700_000_000_000_000_000 + second * 10**9},
        "metrics": {
            "input_sequence_length": {"value": 550 - second, "unit": "tokens"},
            "output_sequence_length": {"value": 120, "unit": "tokens"},
        },
        "error": None,
    }
    for second in (0, 1)
]
AIBRIX = [
    {"timestamp": 21, "requests": [{"Prompt Length": 9, "Output Length": 22, "prompt": "x"}]},
    {
        "timestamp": 521,
        "requests": [
            {"Prompt Length": 5, "Output Length": 7, "prompt": "y"},
            {"Prompt Length": 6, "Output Length": 8, "prompt": "z"},
        ],
    },
]
OPENAI = [
    {"created": 1_700_000_000 + second, "usage": {"prompt_tokens": 12, "completion_tokens": 34 + second}}
    for second in (0, 7)
]
USAGE = [{"arrival_s": 0.0, "usage": {"prompt_tokens": 3, "completion_tokens": 4}}]
BENCH = [{"backend": "x", "input_lens": [10, 30], "output_lens": [20, 40], "ttfts": [0.1, 0.2]}]
TIMED_BENCH = [{"input_lens": [10, 30], "output_lens": [20, 40], "start_times": [7.5, 8.75]}]
WEKA = [
    {
        "id": "a",
        "requests": [
            {"t": 0.0, "in": 100, "out": 20, "hash_ids": [1]},
            {"t": 2.5, "in": 9, "out": 8, "hash_ids": [1]},
        ],
    }
]
SHAREGPT = [
    {"id": "0", "conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c d e"}]},
    {"id": "1", "conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b c"}]},
]
MESSAGES = [{"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]}]

LAYOUTS = {
    "mooncake": (MOONCAKE, [(0, 600, 3), (1, 700, 4)]),
    "mooncake without ids": (
        [{k: v for k, v in record.items() if k != "hash_ids"} for record in MOONCAKE],
        [(0, 600, 3), (1, 700, 4)],
    ),
    "bailian": (BAILIAN, [(0, 40, 9), (30.5, 60, 9), (60, 48, 9)]),
    "aiperf": (AIPERF, [(0, 550, 120), (1, 549, 120)]),
    "aibrix": (AIBRIX, [(0, 9, 22), (0.5, 5, 7), (0.5, 6, 8)]),
    "openai": (OPENAI, [(0, 12, 34), (7, 12, 41)]),
    "openai usage": (USAGE, [(0, 3, 4)]),
    "bench": (BENCH, [(None, 10, 20), (None, 30, 40)]),
    "bench with times": (TIMED_BENCH, [(0, 10, 20), (1.25, 30, 40)]),
    "weka": (WEKA, [(0, 100, 20), (2.5, 9, 8)]),
    "sharegpt": (SHAREGPT, [(None, 2, 3), (None, 1, 2)]),
    "sharegpt messages": (MESSAGES, [(None, 2, 1)]),
}
CONTAINERS = {
    "lines": lambda records: lines(*records),
    "array": lambda records: json.dumps(records),
    "pretty array": lambda records: json.dumps(records, indent=1),
    "pretty objects": lambda records: "\n".join(json.dumps(record, indent=2) for record in records),
    "parquet": lambda records: pa.Table.from_pylist(records),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_columns_decide_in_every_container(read, layout, container):
    records, expected = LAYOUTS[layout]
    trace = read(CONTAINERS[container](records))
    assert trace.report.format == layout.split()[0]
    assert rows(trace) == expected
    assert trace.report.rows_read == len(expected)


FLAT = {
    "azure-2023": (
        "TIMESTAMP",
        "ContextTokens",
        "GeneratedTokens",
        ["2024-05-10 00:00", "2024-05-10 00:00:01"],
    ),
    "azure-2024": (
        "TIMESTAMP",
        "ContextTokens",
        "GeneratedTokens",
        ["2024-05-10T00:00:00Z", "2024-05-10 00:00:01Z"],
    ),
    "vidur": ("arrived_at", "num_prefill_tokens", "num_decode_tokens", [0.5, 1.5]),
    "mooncake": ("timestamp", "input_length", "output_length", [0, 1000]),
}


@pytest.mark.parametrize("container", ["csv", "tsv", "lines", "array", "parquet"])
@pytest.mark.parametrize("layout", FLAT)
def test_flat_layouts_in_every_container(read, tmp_path, layout, container):
    *names, times = FLAT[layout]
    table = pd.DataFrame(dict(zip(names, (times, [1, 2], [3, 4]), strict=True)))
    if container == "parquet":
        trace = read(pa.Table.from_pandas(table))
    elif container in ("csv", "tsv"):
        trace = read(table.to_csv(index=False, sep="\t" if container == "tsv" else ","))
    else:
        trace = read(table.to_json(orient="records", lines=container == "lines"))
    assert trace.report.format == layout
    assert rows(trace) == [(0, 1, 3), (1, 2, 4)]


def test_timestamps_of_parquet(read):
    stamps = pa.array([0, 1_500_000], pa.timestamp("us"))
    trace = read(pa.table({"TIMESTAMP": stamps, "ContextTokens": [1, 2], "GeneratedTokens": [3, 4]}))
    assert rows(trace) == [(0, 1, 3), (1.5, 2, 4)]
    assert trace.report.unit == "date"


def test_hash_ids_keep_their_identity_without_a_sign(read):
    top = 2**64 - 1
    records = [{**MOONCAKE[0], "hash_ids": [top, 1]}, {**MOONCAKE[1], "hash_ids": [top, top - 1]}]
    in_lines = read(lines(*records)).requests["prefix_blocks"]
    assert [ids.tolist() for ids in in_lines] == [[-1, 1], [-1, -2]]
    table = pa.Table.from_pylist([{k: v for k, v in r.items() if k != "hash_ids"} for r in records])
    ids = pa.array([r["hash_ids"] for r in records], pa.list_(pa.uint64()))
    in_parquet = read(table.append_column("hash_ids", ids)).requests["prefix_blocks"]
    assert [i.tolist() for i in in_parquet] == [i.tolist() for i in in_lines]
    text = 'timestamp,input_length,output_length,hash_ids\n0,600,3,"[18446744073709551615, 1]"\n'
    assert read(text).requests["prefix_blocks"][0].tolist() == [-1, 1]
    with pytest.raises(TraceError, match=r"hash_ids is \[1.5\]; expected a list of whole numbers"):
        read(lines({**MOONCAKE[0], "hash_ids": [1.5]}))


def test_turns_of_a_session_arrive_after_their_delays(read):
    trace = read(
        lines(
            {"session_id": "a", "timestamp": 100, "input_length": 300, "output_length": 40, "hash_ids": [1]},
            {"session_id": "b", "timestamp": 200, "input_length": 10, "output_length": 1, "hash_ids": [2]},
            {"session_id": "a", "delay": 1500, "input_length": 150, "output_length": 20, "hash_ids": [1, 2]},
            {"session_id": "a", "delay": 500, "input_length": 15, "output_length": 2, "hash_ids": [1, 2]},
        )
    )
    assert rows(trace) == [(0, 300, 40), (0.1, 10, 1), (1.5, 150, 20), (2.0, 15, 2)]
    assert "turns without a time arrive their delay after the turn before" in repr(trace.report)
    with pytest.raises(TraceError, match="row 2: no 'timestamp'"):
        read(
            lines(
                MOONCAKE[0],
                {"session_id": "a", "delay": 5, "input_length": 1, "output_length": 1, "hash_ids": []},
            )
        )


def test_sessions_of_agents(read):
    inner = {"type": "subagent", "requests": [{"t": 1.0, "in": 7, "out": 6, "hash_ids": [1]}]}
    one = {"id": "a", "hash_id_scope": "local", "requests": [WEKA[0]["requests"][0], inner]}
    assert rows(read(lines(one))) == [(0, 100, 20), (1, 7, 6)]
    with pytest.raises(TraceError, match=r"several sessions.*arrival_s=None") as refused:
        read(lines(one, one))
    trace = follow(refused.value)
    assert rows(trace) == [(None, 100, 20), (None, 7, 6)] * 2
    ids = [i.tolist() for i in trace.requests["prefix_blocks"]]
    assert ids[0] == ids[1] != ids[2] == ids[3]


def test_failed_requests_of_a_benchmark_are_counted(read):
    failed = {"metadata": AIPERF[0]["metadata"], "metrics": {}, "error": {"code": 500}}
    report = read(lines(AIPERF[0], failed, AIPERF[1])).report
    assert (report.rows_read, report.rows_kept, report.dropped) == (3, 2, {"failed request": 1})
    report = read(json.dumps({"input_lens": [1, 2], "output_lens": [0, 3]})).report
    assert (report.rows_read, report.dropped) == (2, {"0 output tokens": 1})
    with pytest.raises(TraceError, match="row 1: output_lens has 1 values; expected 2 as input_lens"):
        read(json.dumps({"input_lens": [1, 2], "output_lens": [3]}))


def test_every_turn_of_a_conversation_is_counted(read):
    said = [
        ("human", "one two"),
        ("gpt", "three"),
        ("oracle", "hm"),
        ("human", "x"),
        ("assistant", "four five"),
    ]
    mixed = {"conversations": [{"from": speaker, "value": text} for speaker, text in said]}
    alone = {"conversations": [{"from": "human", "value": "anyone?"}]}
    trace = read(json.dumps([mixed, alone, {"conversations": []}]))
    assert rows(trace) == [(None, 2, 1), (None, 5, 2)]
    assert trace.report.classes == ("gpt", "assistant")
    assert trace.report.rows_read == 4
    assert trace.report.dropped == {"conversation without a response": 1, "turn of an unknown speaker": 1}


SPEAKERS = st.sampled_from(["human", "gpt", "assistant", "user", "model", "narrator"])


@given(
    st.lists(
        st.lists(st.tuples(SPEAKERS, st.sampled_from(["", "a", "a b"])), max_size=5), min_size=1, max_size=6
    )
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_turn_leaves_without_being_counted(tmp_path, conversations):
    records = [{"conversations": [{"from": s, "value": t} for s, t in turns]} for turns in conversations]
    (tmp_path / "t").write_text(lines(*records))
    turns = [turn for said in conversations for turn in said]
    responses = [t for s, t in turns if s in ("gpt", "assistant", "model")]
    unknown = sum(s == "narrator" for s, _ in turns)
    silent = sum(bool(said) and all(s in ("human", "user") for s, _ in said) for said in conversations)
    kept = sum(t != "" for t in responses)
    if not kept:
        with pytest.raises(TraceError, match=r"no rows|no requests are left"):
            read_trace(tmp_path / "t", token_counter=words)
        return
    report = read_trace(tmp_path / "t", token_counter=words).report
    assert report.rows_kept == kept
    assert report.rows_read == len(responses) + unknown + silent
    assert sum(report.dropped.values()) == report.rows_read - kept


# ---- how text is written --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "arrival_s;input_tokens;output_tokens\n0;10;20\n1,5;30;40\n",
        "sep=;\narrival_s;input_tokens;output_tokens\n0,0;10;20\n1,5;30;40\n",
        '"sep=|"\r\narrival_s|input_tokens|output_tokens\r\n0|10|20\r\n1.5|30|40\r\n',
        "arrival_s\tinput_tokens\toutput_tokens\n0\t10\t20\n1.5\t30\t40\n",
        "# exported by a tool\n# twice\n\narrival_s,input_tokens,output_tokens\n0,10,20\n1.5,30,40\n",
        "# arrival_s, input_tokens, output_tokens\n0,10,20\n1.5,30,40\n",
        "arrival_s, input_tokens, output_tokens\n0, 10, 20\n1.5, 30, 40\n",
        "\ufeff arrival_s ,input_tokens,output_tokens\n0,10,20\n1.5,30,40\n",
        "0.0,10,20\n1.5,30,40\n",
        "2024-05-10 00:00:00,10,20\n2024-05-10 00:00:01.5,30,40\n",
        "arrival_ms,input_tokens,output_tokens\n0,10,20\n1500,30,40\n",
    ],
)
def test_separators_spaces_comments_and_no_header(read, text):
    assert rows(read(text)) == [(0, 10, 20), (1.5, 30, 40)]


def test_a_bad_row_is_named_whatever_stands_before_it(read):
    text = "# tool\nsep=;\n\narrival_s;input_tokens;output_tokens\n0;10;20\n1;30;-4\n"
    with pytest.raises(TraceError, match="trace row 2: output_tokens is -4"):
        read(text)
    with pytest.raises(TraceError, match="trace row 2: 2 columns; expected 3"):
        read(text.replace("1;30;-4", "1;30"))
    report = read(text.replace("1;30;-4", "1;30"), invalid="drop").report
    assert (report.rows_read, report.rows_kept) == (2, 1)


def test_without_a_header_the_report_says_what_was_taken(read):
    assert "no header: the columns are taken as arrival, input and output tokens" in repr(
        read("0.0,374,44\n4.3,396,109\n4.5,879,55\n").report
    )
    for text in ("5.0,1,1\n4.0,1,1\n", "0.5,1\n", "0.5,1,2,chat\n"):  # falling times, too few or many columns
        with pytest.raises(TraceError, match=r"no header, and \d columns \(numbered from 1\)"):
            read(text)
    trace = read(
        "chat,0.5,1,2\ncode,1.5,3,4\n", arrival_s="2", input_tokens="3", output_tokens="4", class_="1"
    )
    assert trace.requests["class"].tolist() == ["chat", "code"]
    with pytest.raises(TraceError, match="a chunk of ServeGen's arrival rates"):
        read("0,22.46,1.8,Gamma,0.05,0.57\n600,20.1,1.7,Gamma,0.05,0.57\n")


def test_a_table_without_times(read):
    trace = read("input_tokens,output_tokens\n10,20\n12,22\n")
    assert rows(trace) == [(None, 10, 20), (None, 12, 22)]
    assert (trace.report.unit, repr(trace.report)[-10:]) == (None, "; no times")
    with pytest.raises(TraceError, match="arrival_s='ts'"):
        read("ts,input_tokens,output_tokens\n0.5,10,20\n1.5,12,22\n")


def test_a_file_of_failures_is_refused(read):
    with pytest.raises(
        TraceError, match=r"no requests are left; .*2 rows read, 0 kept, 2 dropped \(0 output tok"
    ):
        read(TIDY + "0,10,0\n1,12,0\n")


# ---- units ----------------------------------------------------------------------------------------


def named(name: str, *times: object) -> str:
    return f"{name},p,g\n" + "".join(f"{time},1,2\n" for time in times)


@pytest.mark.parametrize(
    ("name", "times", "unit", "last"),
    [
        ("ts", (1_700_000_000_000, 1_700_000_060_000), "ms", 60),
        ("ts", (1_700_000_000, 1_700_000_060), "s", 60),
        ("ts", (1_700_000_000_000_000, 1_700_000_060_000_000), "us", 60),
        ("ts", (1_700_000_000_000_000_000, 1_700_000_060_000_000_000), "ns", 60),
        ("time_ns", (0, 5_000_000_000), "ns", 5),
        ("startTimeMs", (0, 60_000), "ms", 60),
        ("Time (us)", (0, 60_000), "us", 0.06),
        ("when_s", (0, 86_400), "s", 86_400),
        ("elapsed_seconds", (0, 86_400), "s", 86_400),
        ("when_s", (1_700_000_000_000, 1_700_000_060_000), "ms", 60),  # in s it would be the year 55,840
        ("ts", (0, 0.371, 0.812), "s", 0.812),  # a step of 1 ms at a few requests a second
        ("ts", (0, 371, 812), "ms", 0.812),
        ("ts", (0, 371_204_118, 812_330_007), "ns", 0.812330007),
        ("ts", (0, 1, 1, 2, 3), "s", 3),
        ("ts", (5, 5), None, 0),
    ],
)
def test_the_unit_is_decided(read, name, times, unit, last):
    trace = read(named(name, *times), arrival_s=name, input_tokens="p", output_tokens="g")
    assert trace.report.unit == unit
    assert trace.report.unit_reason
    assert trace.requests["arrival_s"].iloc[-1] == pytest.approx(last, rel=1e-6)


@pytest.mark.parametrize(
    "times", [(0, 20, 40), (0, 3600, 7200), (0, 30.5, 60.5), (0, 10**6, 2 * 10**6), (0, 1e-9, 2e-9)]
)
def test_a_unit_in_doubt_is_refused_with_the_call_that_settles_it(read, times):
    columns = {"arrival_s": "ts", "input_tokens": "p", "output_tokens": "g"}
    with pytest.raises(
        TraceError, match=r"in doubt which unit 'ts' is in: 3 arrivals.*unit='s'\)"
    ) as refused:
        read(named("ts", *times), **columns)
    assert follow(refused.value).requests["arrival_s"].iloc[-1] == pytest.approx(times[-1])
    trace = read(named("ts", *times), **columns, unit="ms")
    assert trace.report.unit_reason == "as the caller says"


def timed(*times: float, length: int = 600, block: int = 512) -> str:
    ids = list(range(-(-length // block)))
    return lines(
        *({"timestamp": t, "input_length": length, "output_length": 5, "hash_ids": ids} for t in times)
    )


@pytest.mark.parametrize(
    ("text", "unit", "block"),
    [
        (timed(0, 400, 900), "ms", 512),
        (timed(0.0, 0.2, 0.4), "s", 512),
        (timed(0.0, 30.5, 60.0, length=40, block=16), "s", 16),
        (timed(0.0, 400.25, 900.5), "ms", 512),
    ],
)
def test_mooncakes_unit_is_confirmed_by_rate_fractions_and_blocks(read, text, unit, block):
    report = read(text).report
    assert (report.format, report.unit, report.block_tokens) == ("mooncake", unit, block)
    assert f"blocks of {block} tokens" in repr(report)


@pytest.mark.parametrize(
    "text",
    [
        timed(0, 1, 1, 2),
        timed(0.0, 30.5, 60.0),
        timed(0.0, 40_000.5, 100_000.5),
        timed(0, 30, 60, length=40, block=16),
    ],
)
def test_mooncakes_unit_in_doubt(read, text):
    with pytest.raises(TraceError, match=r"in doubt which unit 'timestamp' is in.*unit="):
        read(text)


@given(st.sampled_from([16, 64, 512]), st.integers(0, 2**32), st.booleans())
def test_the_size_of_a_block_follows_from_lengths_and_ids(block, seed, partial):
    from kvcache.traces.times import block_size

    lengths = np.random.default_rng(seed).integers(600, 9_000, 40)
    ids = [np.arange(-(-n // block) if partial else n // block) for n in lengths.tolist()]
    assert block_size(lengths, ids) == block
    ids[::5] = [np.arange(3)] * 8  # a fifth disagrees
    assert block_size(lengths, ids) is None


def test_a_documented_unit_is_not_believed_against_the_rate(read):
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,2\n60000000000,1,2\n"
    with pytest.raises(TraceError, match="in doubt which unit 'arrived_at'"):
        read(text)


@given(
    st.integers(0, 2**32), st.sampled_from([("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9)]), st.booleans()
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_trace_reads_the_same_in_every_unit(tmp_path, seed, unit, epoch):
    """A few requests a second on a clock of microseconds or coarser, from a start or from 1970."""
    rng = np.random.default_rng(seed)
    name, scale = unit
    seconds = np.cumsum(rng.exponential(0.3, 60)) + (1.7e9 if epoch else 0)
    digits = 6 if name == "s" else 0
    times = [f"{t * scale:.{digits}f}" for t in seconds]
    (tmp_path / "t").write_text(named("at", *times))
    trace = read_trace(tmp_path / "t", arrival_s="at", input_tokens="p", output_tokens="g")
    assert trace.report.unit == name
    # Times of ms are rounded to them.
    atol = 2e-3 if name == "ms" else 5e-6
    np.testing.assert_allclose(trace.requests["arrival_s"], seconds - seconds[0], rtol=0, atol=atol)


# ---- dates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "gap"),
    [
        ("16/11/2023 18:15:46", "16/11/2023 18:15:47", 1),
        ("05/11/2023 23:59:59", "16/11/2023 00:00:00", 10 * 86_400 + 1),
        ("11/16/2023 6:15:46 PM", "11/16/2023 6:15:47.25 pm", 1.25),
        ("11/16/2023 11:59:59 AM", "11/16/2023 12:00:00 PM", 1),
        ("16.11.2023 18:15", "16.11.2023 18:16", 60),
        ("05.06.2023", "06.06.2023", 86_400),
        ("2023/11/16 18:15:46", "2023/11/16 18:15:47", 1),
        ("2023-11-16 18:15:46,100", "2023-11-16 18:15:46,350", 0.25),
        ("2024-01-01 00:00:00 UTC", "2024-01-01 00:00:01.500 UTC", 1.5),
        ("2024-01-01 00:00:00 UTC", "2024-01-01 01:00:01.500+01:00", 1.5),
        ("2024-01-01 00:00:00 PST", "2024-01-01 00:00:01.500 PST", 1.5),
        ("18:15:46", "18:15:47.5", 1.5),
        ("11:59:59 AM", "12:00:01 PM", 2),
    ],
)
def test_dates_as_people_write_them(read, first, second, gap):
    text = f'when,p,g\n"{first}",1,2\n"{second}",1,2\n'
    trace = read(text, arrival_s="when", input_tokens="p", output_tokens="g")
    assert trace.requests["arrival_s"].tolist() == pytest.approx([0, gap], abs=1e-9)
    assert trace.report.unit == "date"


@given(
    st.datetimes(min_value=pd.Timestamp("1950-01-01"), max_value=pd.Timestamp("2150-01-01")),
    st.integers(0, 2),
)
@settings(max_examples=150, deadline=None)
def test_any_date_in_any_style(stamp, style):
    from kvcache.traces.times import Clock

    form = ["%d/%m/%Y %I:%M:%S.%f %p", "%m/%d/%Y %H:%M:%S.%f", "%Y/%m/%d %H:%M:%S.%f"][style]
    clock = Clock(day_first=style == 0)
    values, bad = clock.read(pa.array([stamp.strftime(form)]))
    assert bad == {}
    assert values[0] == pd.Timestamp(stamp).value


def test_dates_in_doubt_are_refused(read):
    columns = {"arrival_s": "when", "input_tokens": "p", "output_tokens": "g"}
    text = "when,p,g\n05/06/2023,1,2\n06/06/2023,1,2\n"
    with pytest.raises(
        TraceError, match="in doubt whether '05/06/2023' has its day or its month first"
    ) as refused:
        read(text, **columns)
    assert follow(refused.value).requests["arrival_s"].tolist() == [0, 86_400]
    assert read(text, **columns, day_first=False).requests["arrival_s"].tolist() == [0, 31 * 86_400]
    with pytest.raises(
        TraceError, match=r"row 2: when is '06/13/2023'; expected a date \(day first\) without a zone"
    ):
        read(text.replace("06/06", "06/13"), **columns, day_first=True)
    with pytest.raises(TraceError, match=r"row 2: .* has the zone PDT; expected a date with the zone PST"):
        read("when,p,g\n2024-03-10 01:59:59 PST,1,2\n2024-03-10 03:00:00 PDT,1,2\n", **columns)
    with pytest.raises(TraceError, match=r"times of day that pass midnight.*arrival_s=None"):
        read("when,p,g\n23:59:59,1,2\n00:00:01,1,2\n", **columns)
    with pytest.raises(TraceError, match="row 1: when is 'yesterday'; expected a number or a date"):
        read("when,p,g\nyesterday,1,2\n", **columns)


# ---- advice ---------------------------------------------------------------------------------------


def follow(error: TraceError) -> Trace:
    """The result of the call that an error names."""
    call = re.search(r"read_trace\(.*\)$", str(error))
    assert call, error
    return eval(call[0], {"read_trace": read_trace})


@pytest.mark.parametrize(
    "content",
    [
        "when,p,g\n16/11/2023 18:15:46,10,20\n16/11/2023 18:15:47,30,40\n",
        "when,p,g\n11/16/2023 6:15:46 PM,10,20\n11/16/2023 6:15:47 PM,30,40\n",
        "id,ts,prompt,gen\n7,1700000000000,10,20\n8,1700000001000,30,40\n",
        lines(
            {"meta": {"sent": {"at_ms": 5}}, "sizes": {"prompt": 10, "answer": 20}},
            {"meta": {"sent": {"at_ms": 1005}}, "sizes": {"prompt": 30, "answer": 40}},
        ),
        json.dumps([{"start": 0.5, "isl": 10, "osl": 20}, {"start": 1.5, "isl": 30, "osl": 40}]),
        pa.table(
            {"t_ms": [0, 1000], "n": pa.array([{"context": 10, "new": 20}, {"context": 30, "new": 40}])}
        ),
    ],
)
def test_the_call_that_an_error_names_reads_the_file(read, content):
    with pytest.raises(TraceError, match=r"fit none of burstgpt, .*; name them: read_trace") as refused:
        read(content)
    assert rows(follow(refused.value)) == [(0, 10, 20), (1, 30, 40)]


def test_nested_members_can_be_named(read):
    content = lines({"a": {"t_s": 1.5}, "n": [{"i": 1, "o": 2}, {"i": 3, "o": 4}]})
    trace = read(content, arrival_s="a.t_s", input_tokens="n.i", output_tokens="n.o")
    assert rows(trace) == [(0, 1, 2), (0, 3, 4)]
    with pytest.raises(TraceError, match=r"no column 'n\.x'; found 'a\.t_s', 'n\.i', 'n\.o'"):
        read(content, arrival_s="a.t_s", input_tokens="n.i", output_tokens="n.x")


def test_lists_in_lists_and_no_times_are_advised(read):
    done = [{"prompt_tokens": 1, "output_tokens": 2}, {"prompt_tokens": 3, "output_tokens": 4}]
    report = {"benchmarks": [{"requests": {"successful": done}}, {"requests": {"successful": done[:1]}}]}
    with pytest.raises(
        TraceError, match=r"arrival_s=None, input_tokens='benchmarks\.requests\.succ"
    ) as refused:
        read(json.dumps(report, indent=2))
    assert rows(follow(refused.value)) == [(None, 1, 2), (None, 3, 4), (None, 1, 2)]
    with pytest.raises(TraceError, match=r"arrival_s='\.\.\.'"):
        read("a,b\n1,2\n")  # either may be a time


def test_a_long_first_record_is_recognised(tmp_path):
    path = Path(tmp_path) / "bench.json"
    path.write_text(
        json.dumps({"itls": [[0.01] * 50] * 800, "input_lens": [3] * 800, "output_lens": [4] * 800})
    )
    assert path.stat().st_size > 200_000
    assert len(read_trace(path).requests) == 800
