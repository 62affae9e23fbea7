"""Command lines, as the engine itself reads them where it is installed."""

import shlex
from dataclasses import replace
from importlib.util import find_spec

import pytest

from kvcache import GPU, Model, ParallelConfig
from kvcache.groups import group
from kvcache.planner.launch import command

MODEL = Model("8B", 32, 32, 8, 128, 8_030_261_248, hidden_size=4096, vocabulary=128256, max_position=131072)
CARD = GPU("own", memory_bytes=48e9, flops=362e12, bandwidth=864e9)


@pytest.fixture(scope="module")
def serving():
    return group(
        MODEL,
        CARD,
        "vllm",
        ParallelConfig(2),
        cache_dtype="fp8",
        memory_utilisation=0.85,
        max_model_len=4096,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
    )


def flags(line):
    """Words that start with --, each with what follows."""
    words = shlex.split(line)
    return {
        word: words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else ""
        for at, word in enumerate(words)
        if word.startswith("--")
    }


def test_vllm(serving):
    found = flags(command(serving, watermark=0.0123, port=8001))
    assert found == {
        "--tensor-parallel-size": "2",
        "--pipeline-parallel-size": "1",
        "--gpu-memory-utilization": "0.85",
        "--kv-cache-dtype": "fp8",
        "--max-model-len": "4096",
        "--max-num-batched-tokens": "2048",
        "--max-num-seqs": "64",
        "--enable-chunked-prefill": "",
        "--enable-prefix-caching": "",
        "--watermark": "0.0123",
        "--port": "8001",
    }
    assert "--no-enable-prefix-caching" in flags(command(serving, prefix_caching=False))


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("sglang", {"--tp-size": "2", "--mem-fraction-static": "0.85", "--max-running-requests": "64"}),
        ("trtllm", {"--tp_size": "2", "--max_num_tokens": "2048", "--max_batch_size": "64"}),
    ],
)
def test_other_engines(serving, engine, expected):
    assert expected.items() <= flags(command(replace(serving, engine=engine))).items()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"max_num_seqs": 4096}, {}, "max_num_seqs is 4096; expected at most max_num_batched_tokens = 2048"),
        ({"max_model_len": 10**7}, {}, r"max_model_len is 10,000,000; expected at most the pool's"),
        ({}, {"watermark": 1.0}, "watermark is 1.0"),
        ({"engine": "sglang"}, {"phase": "decode"}, "no flags are known here for decode groups of sglang"),
    ],
)
def test_what_an_engine_refuses_is_not_printed(serving, change, options, message):
    with pytest.raises(ValueError, match=message):
        command(replace(serving, **change), **options)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("phase", ["both", "prefill", "decode"])
def test_vllm_parses_the_line(serving, phase):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = shlex.split(command(serving, watermark=0.0123, phase=phase))
    assert words[:2] == ["vllm", "serve"]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words[2:])
    assert parsed.max_num_seqs == 64
    assert parsed.max_model_len == 4096
    assert parsed.watermark == 0.0123
    assert parsed.kv_cache_dtype == "fp8"
