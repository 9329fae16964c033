"""Numbers and tables as text, for the terminal, Markdown and CSV alike."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence

import numpy as np

Table = tuple[str, list[str], list[list[str]]]  # title, columns, rows
_FACTORS = {"k": 1e3, "m": 1e6, "g": 1e9}


def millions(count: float) -> str:
    """6859876 -> 6.86M, 2684440000 -> 2.684G; a few thousand as they are."""
    if count < 1e4:
        return f"{count:,.0f}"
    return f"{count / 1e9:.3f}G" if count >= 1e9 else f"{count / 1e6:.2f}M"


def counted(number: int, what: str) -> str:
    """1 worker, 2 workers, 1,000 images."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def parse_count(text: str, name: str) -> float:
    """15M -> 15000000, 1.2G, 800k or plain numbers; `name` stands in the sentence about anything else."""
    number, factor = text.strip(), 1.0
    if number[-1:].lower() in _FACTORS:
        number, factor = number[:-1], _FACTORS[number[-1:].lower()]
    try:
        count = float(number) * factor
    except ValueError:
        count = math.nan
    if not 0 < count < math.inf:
        raise ValueError(f"{name} must be a count such as 15M, got {text!r}")
    return count


def with_spread(values: Sequence[float] | np.ndarray, digits: int = 2) -> str:
    """The mean, and the standard deviation where there is more than one."""
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {np.std(values, ddof=1):.{digits}f}"


def is_numeric(cells: Sequence[str]) -> bool:
    """Whether a column holds numbers, which are aligned to the right."""
    return all(cell[:1] in "0123456789+-–" for cell in cells)


def to_markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; bars in cells are escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def to_csv(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as comma-separated values."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()
