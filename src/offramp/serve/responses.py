"""What `/predict` answers, and what it keeps to itself.

Which exit an image took says something about what the network saw in training. So unless the operator reveals it,
an answer holds nothing that depends on the exit: no cost, no guesses, not whether the image was forced out; and a
client that chose a limit gets no confidence, since comparing confidences under several limits would give it away.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, Field

from offramp.running.bundle import Bundle
from offramp.running.pool import Left
from offramp.serve.requests import JsonRequest, Limits
from offramp.serve.service import RequestResult


class Guess(BaseModel):
    """What one exit thought of an image."""

    exit: int
    label: str
    confidence: float | None


class Prediction(BaseModel):
    """One image's answer; `forced` and what follows only if the server was started with `reveal_exit`."""

    label: str
    class_: int = Field(alias="class", description="The label's number.")
    confidence: float | None = Field(None, description="Left out if the client set a limit and exits are not revealed.")
    forced: bool = Field(False, description="Whether a limit made the image leave before it was confident.")
    exit: int = Field(0, description="The exit taken, from 1.")
    mul_adds: int = Field(0, description="What the image cost.")
    guesses: list[Guess] = Field([], description="Of every exit the image passed.")


class Answer(BaseModel):
    """The images' answers in their order; `limited` says whether this request ran under any limit."""

    predictions: list[Prediction]
    limited: bool


REQUEST_BODY = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {
                    "images": {"type": "array", "items": {"type": "string", "format": "binary"}},
                    "max_exit": {"type": "integer"},
                    "deadline_ms": {"type": "number"},
                },
            }
        },
        "application/json": {"schema": JsonRequest.model_json_schema()},
    },
}


def response(bundle: Bundle, given: RequestResult, reveal: bool) -> dict[str, Any]:
    """The JSON that a request is answered with."""
    sure = reveal or not _chose_a_limit(given.limits, len(bundle.costs))
    predictions = [_prediction(bundle, left, sure, reveal) for left in given.left]
    return {"predictions": predictions, "limited": given.limited}


def _chose_a_limit(limits: Limits, num_exits: int) -> bool:
    return limits.deadline_ms is not None or (limits.max_exit or num_exits) < num_exits


def _prediction(bundle: Bundle, left: Left, sure: bool, reveal: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"label": bundle.classes[left.label], "class": left.label}
    if sure:
        found["confidence"] = _finite(left.confidence)
    if reveal:
        guesses = enumerate(left.ticket.guesses, start=1)
        found["forced"], found["exit"], found["mul_adds"] = left.forced, left.exit, bundle.costs[left.exit - 1]
        found["guesses"] = [
            {"exit": k, "label": bundle.classes[label], "confidence": _finite(own)} for k, (label, own) in guesses
        ]
    return found


def _finite(confidence: float) -> float | None:
    """JSON has no word for what is not a number."""
    return confidence if math.isfinite(confidence) else None
