"""Arrival times: which unit numbers are in, and dates in the ways that people write them.

Nothing is assumed in silence. The unit of numbers follows from the column's name, the size of epochs, the
rate of arrivals that each unit would mean, and the tokens of a prefix block; the order of day and month
from a day above 12. What stays open is refused (`Doubt`).
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

__all__ = [
    "UNITS",
    "Clock",
    "Doubt",
    "block_size",
    "decide_unit",
    "has_zone",
    "is_number",
    "is_text",
    "is_time",
    "numbers",
]

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}

_UNIT_WORDS = {
    "s": "s|secs?|seconds?",
    "ms": "ms|msecs?|millis|milliseconds?",
    "us": "us|µs|usecs?|micros|microseconds?",
    "ns": "ns|nsecs?|nanos|nanoseconds?",
}
# Seconds from 2001-09-09 to 2100, and the year 2200.
_EPOCH_S, _LATEST_S = (1e9, 4.1e9), 7_258_118_400
# Dates outside would overflow differences of nanoseconds, or are a mistake anyway.
_EARLIEST_NS, _LATEST_NS = -2_208_988_800 * 10**9, _LATEST_S * 10**9  # 1900 .. 2200
# Requests per second of a trace: conceivable, and usual ("a few") where nothing but the rate can tell.
_CONCEIVABLE, _USUAL = (1e-5, 1e5), (0.5, 20.0)
_BAILIAN_BLOCK = 16

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_CLOCK = r"(?P<H>\d{1,2}):(?P<M>\d\d):(?P<S>\d\d)(?:[.,](?P<f>\d{1,9}))?(?:\s*(?P<half>[AaPp])\.?[Mm]\.?)?"
_PART = _CLOCK.replace(r":(?P<M>\d\d):(?P<S>\d\d)", r"(?::(?P<M>\d\d)(?::(?P<S>\d\d)").replace(
    r"(?P<f>\d{1,9}))?", r"(?P<f>\d{1,9}))?)?)?"
)
_ZONE = r"\s*(?P<zone>Z|[+-]\d\d(?::?\d\d)?|[A-Z]{3,5})?"
_DAY = {
    "year first": r"(?P<y>\d{4})[-/.](?P<m>\d{1,2})[-/.](?P<d>\d{1,2})",
    "day first": r"(?P<d>\d{1,2})[-/.](?P<m>\d{1,2})[-/.](?P<y>\d{4})",
    "month first": r"(?P<m>\d{1,2})[-/.](?P<d>\d{1,2})[-/.](?P<y>\d{4})",
}
_STYLES = {order: rf"^\s*{day}(?:(?:T|\s+){_PART}{_ZONE})?\s*$" for order, day in _DAY.items()}
_STYLES["time of day"] = rf"^\s*{_CLOCK}\s*$"
_UTC = ("Z", "UTC", "GMT")
_DAY_NS = 86_400 * 10**9


class Doubt(ValueError):
    """Times that can be read in more than one way; ``option`` is the keyword that settles it."""

    def __init__(self, message: str, option: str) -> None:
        super().__init__(message)
        self.option = option


# ---- the unit of numbers --------------------------------------------------------------------------


def decide_unit(
    column: str, times: NDArray[np.float64], documented: str | None = None, block: int | None = None
) -> tuple[str, str] | None:
    """The unit of numeric arrivals and the reason; None while all of them are one instant.

    Parameters
    ----------
    column : the column's name, which may end in a unit (``ts_ms``, ``timeNs``, ``Time (s)``).
    times : (n,) finite numbers, as in the file.
    documented : the unit that the file's format is documented to have.
    block : tokens of a prefix block (16 in Bailian's traces, which are in seconds; 512 in Mooncake's).

    Raises
    ------
    Doubt
        If more than one unit would do.
    """
    low, high = float(times.min()), float(times.max())
    named = next(
        (u for u, words in _UNIT_WORDS.items() if re.search(_suffix(words), column)),
        None,
    )
    if named and max(-low, high) * UNITS[named] <= _LATEST_S:
        return named, f"the column is named {column!r}"
    for unit, scale in UNITS.items():
        if _EPOCH_S[0] <= low * scale and high * scale <= _EPOCH_S[1]:
            day = np.datetime64(int(low * scale), "s").astype("datetime64[D]")
            return unit, f"counted from 1970, the first is on {day}"
    if high == low:
        return None
    rate = {unit: (times.size - 1) / ((high - low) * scale) for unit, scale in UNITS.items()}
    whole = bool((times == np.floor(times)).all())
    unit = _by_rate(rate, times, whole, documented, block)
    if unit is None:
        each = ", ".join(f"{rate[u]:,.3g} in {u}" for u in UNITS if _within(rate[u], _CONCEIVABLE))
        raise Doubt(
            f"in doubt which unit {column!r} is in: {times.size:,} arrivals from {low:.15g} to {high:.15g}; "
            f"requests per second: {each or 'beyond reason in every unit'}",
            "unit",
        )
    why = f"{rate[unit]:,.3g} requests/s"
    if unit == documented:
        why = f"as this format is documented; {why}"
    elif block == _BAILIAN_BLOCK and unit == "s":
        why = f"blocks of {block} tokens, as in Bailian's traces; {why}"
    return unit, f"{why}, {'whole numbers' if whole else 'fractions'}"


def _suffix(words: str) -> str:
    return (
        rf"(?i:[_\-.\s(\[](?:{words})[)\]]?$)|[a-z](?:{'|'.join(w.capitalize() for w in words.split('|'))})$"
    )


def _within(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= value <= bounds[1]


def _by_rate(
    rate: dict[str, float],
    times: NDArray[np.float64],
    whole: bool,
    documented: str | None,
    block: int | None,
) -> str | None:
    if documented == "s":
        return "s" if _within(rate["s"], _CONCEIVABLE) else None
    if not whole and (rate["s"] >= 0.1 or block == _BAILIAN_BLOCK) and _within(rate["s"], _CONCEIVABLE):
        return "s"
    if documented == "ms":
        if block == _BAILIAN_BLOCK:
            return "s" if rate["s"] >= _USUAL[0] and whole else None
        return "ms" if _within(rate["ms"], (0.005 if whole else 0.05, 1000.0 if whole else 10.0)) else None
    if whole and _within(rate["s"], (_USUAL[0], _CONCEIVABLE[1])):
        return "s"
    # Whole numbers of a fine clock: at a few requests a second their differences share no round factor.
    whole = whole and np.ptp(times) < 2**53
    step = np.gcd.reduce(np.diff(np.unique(times)).astype(np.int64)) if whole else 0
    for unit in ("ms", "us", "ns"):
        if whole and _within(rate[unit], _USUAL) and step * UNITS[unit] < 0.01:
            return unit
    return None


def block_size(inputs: NDArray[np.int64], blocks: list[NDArray[np.int64]]) -> int | None:
    """Tokens of a prefix block: the power of two that agrees with prompt lengths and numbers of ids.

    None where no size from 8 to 4,096, or more than one, agrees with 9 of 10 prompts.
    """
    ids = np.fromiter(map(len, blocks), np.int64, len(blocks))
    used = ids > 0
    if not used.any():
        return None
    ids, inputs = ids[used], inputs[used]
    sizes = [2**k for k in range(3, 13)]
    for last in (-(-inputs // np.array(sizes)[:, None]), inputs // np.array(sizes)[:, None]):  # with, without
        share = (last == ids).mean(axis=1)  # a partly filled last block
        if share.max() >= 0.9:
            agreeing = np.flatnonzero(share == share.max())
            return sizes[agreeing[0]] if agreeing.size == 1 else None
    return None


# ---- numbers --------------------------------------------------------------------------------------


def is_text(array: pa.Array) -> bool:
    """Whether an Arrow array is of strings."""
    return pa.types.is_string(array.type) or pa.types.is_large_string(array.type)


def is_number(text: str) -> bool:
    """Whether a text is a plain number, spaces around it aside."""
    return bool(_NUMBER.fullmatch(text.strip()))


def numbers(array: pa.Array) -> tuple[NDArray[np.float64], dict[int, str]]:
    """Finite floats, NaN where there is none, and by row what was found in its place."""
    values = None
    if not pa.types.is_boolean(array.type):
        trimmed = pc.utf8_trim_whitespace(array) if is_text(array) else array
        with suppress(pa.ArrowInvalid, pa.ArrowNotImplementedError):
            values = pc.cast(trimmed, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if values is None:
        values = np.array([_number(value) for value in array.to_pylist()], np.float64)
    wrong = np.flatnonzero(~np.isfinite(values)).tolist()
    return values, {i: _found(array[i].as_py()) for i in wrong}


def _number(value: Any) -> float:
    if isinstance(value, str):
        return float(value) if is_number(value) else math.nan
    if isinstance(value, bool) or value is None:
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _found(value: Any) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        return "is empty"
    return f"is {value[:40]!r}" if isinstance(value, str) else f"is {str(value)[:40]}"


# ---- dates ----------------------------------------------------------------------------------------


def has_zone(text: str) -> bool:
    """Whether a date and time ends in ``Z``, ``UTC``, ``GMT`` or an offset."""
    return bool(re.search(r"(Z|UTC|GMT|:\d\d(\.\d+)?\s*[+-]\d\d(:?\d\d)?)\s*$", text, re.ASCII))


def is_time(text: str) -> bool:
    """Whether a text is a number, a date or a time of day."""
    return is_number(text) or any(re.search(style, text, re.ASCII) for style in _STYLES.values())


class Clock:
    """Reads the arrivals of one file.

    ``zone`` says whether dates must (True) or must not (False) carry a zone (None: as the first one),
    ``day_first`` whether 05/06/2023 is in June, ``comma`` whether numbers have a decimal comma;
    ``style`` is "number" or how dates are written, known from the first chunk on.
    """

    def __init__(
        self,
        zone: bool | None = None,
        day_first: bool | None = None,
        comma: bool = False,
        authority: str = "",
    ) -> None:
        self.style: str | None = None
        self._zone: bool | str | None = zone
        self._must_be_date = zone is not None
        self._day_first, self._comma = day_first, comma
        self._authority = authority or "this file"
        self._last_ns: int | None = None

    def read(self, array: pa.Array) -> tuple[NDArray[Any], dict[int, str]]:
        """Times as int64 nanoseconds (dates) or float64 (numbers), and what is wrong by row."""
        kind = array.type
        if pa.types.is_timestamp(kind):
            self.style = "timestamp"
            empty = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
            stamps = array.fill_null(0).cast(pa.timestamp("ns", kind.tz)).cast(pa.int64()).to_numpy()
            return _within_range(stamps, dict.fromkeys(empty.tolist(), "is empty; expected a date"), array)
        if pa.types.is_date(kind) or pa.types.is_time(kind):
            array = array.cast(pa.string())
        if not is_text(array):
            self.style = "number"
        if self.style is None:
            first = next((text.strip() for text in array.to_pylist() if text and text.strip()), "")
            self.style = self._style_of(first, array)
        if self.style != "number":
            return self._dates(array)
        if self._comma and is_text(array):
            array = pc.replace_substring(array, ",", ".")
        values, bad = numbers(array)
        return values, {i: f"{found}; expected a number or a date" for i, found in bad.items()}

    def _style_of(self, first: str, array: pa.Array) -> str:
        if is_number(first.replace(",", ".") if self._comma else first):
            return "number"
        fitting = [style for style, pattern in _STYLES.items() if re.search(pattern, first, re.ASCII)]
        if "day first" in fitting:
            fitting = [self._order(first, array)]
        elif not fitting:
            fitting = ["year first" if self._must_be_date else "number"]
        if self._zone is None and fitting[0] != "number":
            self._zone = _zone_of(first)
        return fitting[0]

    def _order(self, first: str, array: pa.Array) -> str:
        if self._day_first is not None:
            return "day first" if self._day_first else "month first"
        if re.match(r"\s*\d+\.", first):
            return "day first"  # dots are written nowhere with the month first
        parts = pc.extract_regex(array, _STYLES["day first"])
        ahead, behind = (_whole(parts, field).max(initial=0) for field in "dm")
        if (ahead > 12) == (behind > 12):
            raise Doubt(f"in doubt whether {first!r} has its day or its month first", "day_first")
        return "day first" if ahead > 12 else "month first"

    def _dates(self, array: pa.Array) -> tuple[NDArray[np.int64], dict[int, str]]:
        if self.style == "year first" and not isinstance(self._zone, str):
            kind = pa.timestamp("ns", "UTC" if self._zone else None)
            with suppress(pa.ArrowInvalid, ValueError):
                return _within_range(pc.cast(array, kind).cast(pa.int64()).to_numpy(), {}, array)
        assert self.style is not None
        stamps, zones, right = _parsed(array, _STYLES[self.style])
        bad: dict[int, str] = {}
        for i in np.flatnonzero(~right).tolist():
            text = (array[i].as_py() or "").strip()
            bad[i] = f"{f'is {text[:40]!r}' if text else 'is empty'}; expected {self._expected()}"
        if zones is not None:
            for zone in zones.dictionary.to_pylist():
                if _zone_of(zone or "") != self._zone:
                    has = (
                        "has no zone"
                        if not zone
                        else "has a zone"
                        if _zone_of(zone) is True
                        else f"has the zone {zone}"
                    )
                    expected = f"expected {self._expected()}, as elsewhere in {self._authority}"
                    for i in np.flatnonzero(
                        pc.equal(zones.dictionary_decode(), zone).to_numpy(False)
                    ).tolist():
                        found = (array[i].as_py() or "").strip()[:40]
                        bad.setdefault(i, f"is {found!r}, which {has}; {expected}")
        if self.style == "time of day":
            self._one_day(stamps[right])
        return _within_range(stamps, bad, array)

    def _expected(self) -> str:
        if self.style == "time of day":
            return "a time of day"
        order = "" if self.style == "year first" else f" ({self.style})"
        zone = f"the zone {self._zone}" if isinstance(self._zone, str) else "a zone"
        return f"a date{order} {'with' if self._zone else 'without'} {zone}"

    def _one_day(self, stamps: NDArray[np.int64]) -> None:
        """Times of day must not pass midnight: which day they are of is not in the file."""
        known = stamps if self._last_ns is None else np.concatenate([[self._last_ns], stamps])
        if (np.diff(known) < -_DAY_NS // 2).any():
            raise Doubt(
                "times of day that pass midnight, and no dates; expected dates, or a day a file", "arrival_s"
            )
        self._last_ns = int(known[-1]) if known.size else None


def _zone_of(text: str) -> bool | str:
    """True for an offset or UTC, False for none, or the name of a zone whose offset is not in the file."""
    name = re.search(r"([A-Z]{3,5})\s*$", re.sub(r"[AaPp]\.?[Mm]\.?\s*$", "", text))
    if name and name.group(1) not in _UTC:
        return name.group(1)
    return text.strip() in _UTC or bool(re.fullmatch(r"[+-]\d\d(:?\d\d)?", text)) or has_zone(text)


def _whole(parts: pa.Array, field: str) -> NDArray[np.int64]:
    """A numeric group of a match, 0 where it is not there."""
    if field not in [f.name for f in parts.type]:
        return np.zeros(len(parts), np.int64)
    text = pc.fill_null(pc.struct_field(parts, field), "")
    return pc.cast(pc.if_else(pc.equal(text, ""), "0", text), pa.int64()).to_numpy()


def _parsed(
    array: pa.Array, style: str
) -> tuple[NDArray[np.int64], pa.DictionaryArray | None, NDArray[np.bool_]]:
    """Nanoseconds since 1970 (of the day), the zones as written, and which rows are dates at all."""
    parts = pc.extract_regex(array, style)
    right = parts.is_valid().to_numpy(zero_copy_only=False).copy()
    hour, minute, second = (_whole(parts, field) for field in "HMS")
    half = pc.utf8_lower(pc.fill_null(pc.struct_field(parts, "half"), "")).to_numpy(zero_copy_only=False)
    twelve = half != ""
    right &= ~twelve | ((hour >= 1) & (hour <= 12))
    hour = np.where(twelve, hour % 12 + 12 * (half == "p"), hour)
    right &= (hour < 24) & (minute < 60) & (second < 60)
    fraction = pc.utf8_rpad(pc.fill_null(pc.struct_field(parts, "f"), ""), 9, "0").cast(pa.int64()).to_numpy()
    stamps = ((hour * 60 + minute) * 60 + second) * 10**9 + fraction
    if "(?P<y>" not in style:
        return stamps, None, right
    year, month, day = (_whole(parts, field) for field in "ymd")
    right &= (month >= 1) & (month <= 12) & (day >= 1)
    first = (year - 1970).astype("datetime64[Y]").astype("datetime64[M]") + (month - 1)
    date = first.astype("datetime64[D]") + (day - 1)
    right &= date.astype("datetime64[M]") == first
    days = np.clip(date.astype(np.int64), -25_568, 84_007)  # a little more than 1900 .. 2200
    stamps += days * _DAY_NS
    zones = pc.struct_field(parts, "zone").dictionary_encode()
    names = zones.dictionary.to_pylist()
    shift = np.array([_offset_s(zone or "") for zone in names] + [0], np.int64)
    stamps -= shift[pc.fill_null(zones.indices, len(names)).to_numpy()] * 10**9
    return stamps, zones, right


def _offset_s(zone: str) -> int:
    found = re.fullmatch(r"([+-])(\d\d):?(\d\d)?", zone)
    if not found:
        return 0
    return int(found[1] + "1") * (int(found[2]) * 3600 + int(found[3] or 0) * 60)


def _within_range(
    stamps: NDArray[np.int64], bad: dict[int, str], array: pa.Array
) -> tuple[NDArray[np.int64], dict[int, str]]:
    for i in np.flatnonzero((stamps < _EARLIEST_NS) | (stamps > _LATEST_NS)).tolist():
        bad.setdefault(i, f"is {str(array[i])[:40]!r}; expected a date within 1900-2199")
    return stamps, bad
