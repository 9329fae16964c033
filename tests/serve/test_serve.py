"""The server over real HTTP: what is answered, in which order, and what goes wrong."""

from __future__ import annotations

import base64
import time

import httpx
import numpy as np
import pytest

from helpers.server import COSTS, POLICY, FakeEngine, Start, labels, make_bundle, picture, until
from offramp.running.pool import Pool, Ticket
from offramp.serve.worker import Over, Worker


def test_one_image_many_images_and_json_are_answered_in_order(start: Start) -> None:
    server = start(reveal_exit=True, batch=5)
    wanted = [(label, 1 + (label + turn) % 3) for turn in range(3) for label in range(10)]
    for number, (label, exit_) in enumerate(wanted):
        found = server.send(picture(label, exit_, kind="PNG" if number % 2 else "JPEG")).json()["predictions"]
        assert [(one["class"], one["exit"]) for one in found] == [(label, exit_)]
    images = [picture(label, exit_, side=8 + 5 * label) for label, exit_ in wanted]
    together = server.send(*images)
    as_json = {"images": [base64.b64encode(image).decode() for image in images]}
    again = server.http.post("/predict", json=as_json)
    assert labels(together) == labels(again) == [label for label, _ in wanted]
    assert together.json() == again.json()
    assert [one["exit"] for one in together.json()["predictions"]] == [exit_ for _, exit_ in wanted]


def test_an_answer_with_everything(start: Start) -> None:
    found = start(reveal_exit=True).send(picture(4, 2)).json()
    assert found == {
        "predictions": [
            {
                "label": "class <4>",
                "class": 4,
                "confidence": pytest.approx(0.9),
                "forced": False,
                "exit": 2,
                "mul_adds": COSTS[1],
                "guesses": [
                    {"exit": 1, "label": "class <5>", "confidence": pytest.approx(0.1)},
                    {"exit": 2, "label": "class <4>", "confidence": pytest.approx(0.9)},
                ],
            }
        ],
        "limited": False,
    }


def test_requests_share_batches_and_the_easy_one_is_answered_first(start: Start) -> None:
    server = start()
    engine = server.engine
    engine.open[1].clear()
    first = server.later(picture(0, 1))
    assert engine.reached[1].wait(5)
    easy, hard = server.later(picture(1, 1)), server.later(picture(2, 3))
    until(lambda: len(server.service.worker._arrived) == 2)
    engine.open[2].clear()
    engine.open[1].set()
    assert labels(first.result(5)) == [0] and labels(easy.result(5)) == [1]
    assert engine.batches == [(1, 1), (1, 2)]
    assert engine.reached[2].wait(5) and not hard.done()
    engine.open[2].set()
    assert labels(hard.result(5)) == [2]
    assert engine.batches[2:] == [(2, 1), (3, 1)]


def test_a_lone_image_waits_for_nobody(start: Start) -> None:
    server = start(wait_ms=60_000)
    began = time.monotonic()
    assert labels(server.send(picture(3, 3))) == [3]
    assert time.monotonic() - began < 10


def test_with_a_stage_under_way_everybody_is_answered_once(start: Start) -> None:
    """As on a GPU, where the next stage runs while the host decides about the last one."""
    server = start(wait_ms=60_000, batch=4)
    server.engine.ahead = 1
    asked = [(at % 10, at % 3 + 1) for at in range(40)]
    waiting = [server.later(picture(*one)) for one in asked]
    assert [labels(each.result()) for each in waiting] == [[label] for label, _ in asked]
    assert labels(server.send(picture(3, 3))) == [3]
    assert server.service.taken == 0


def test_nobody_expires_out_of_a_stage_that_runs() -> None:
    """It is computed already, and charged; the answer comes with the end of the stage."""
    engine = FakeEngine()
    engine.ahead = 1
    pool = Pool(engine, POLICY, batch=2, wait_s=60, guesses=True)
    over: list[Over] = []
    worker = Worker(pool, over.extend)
    tickets = [Ticket(name, 3, deadline=time.perf_counter() + 60) for name in ("a", "b")]
    worker.submit(make_bundle(engine).prepare([picture(1, 3), picture(2, 3)]), tickets)
    assert worker._take_in()
    for _ in range(3):  # start, judge, start the second
        worker._step()
    for ticket in tickets:
        ticket.deadline = 0.0
    worker._expire()
    assert pool.running and not over
    worker._step()
    assert [(one.ticket.key, one.left.exit, one.left.forced) for one in over if one.left] == [
        ("a", 2, True),
        ("b", 2, True),
    ]


def test_a_few_late_images_are_not_held_up_by_full_early_stages() -> None:
    engine = FakeEngine()
    pool = Pool(engine, POLICY, batch=2, wait_s=60, patience_s=0.1)
    images = make_bundle(engine).prepare([picture(1, 3), picture(2, 1)])
    pool.add(images, [Ticket("late", 3), Ticket("early", 3)])
    assert [left.ticket.key for left in pool.work()] == ["early"]
    pool.add(images, [Ticket("a", 3), Ticket("b", 3)])
    pool.queues[1][0].since -= 1
    assert pool.work() == [] and engine.batches == [(1, 2), (2, 1)]


def test_a_client_that_goes_away_costs_no_further_stage(start: Start) -> None:
    server = start(client_mul_adds_per_s=1e6)
    server.engine.open[1].clear()
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=server.url, timeout=0.3, trust_env=False) as hasty:
        hasty.post("/predict", files={"images": picture(1, 3)})
    until(lambda: server.count('offramp_requests_total{status="499"}') == 1)
    server.engine.open[1].set()
    until(lambda: server.service.taken == 0)
    assert server.engine.batches == [(1, 1)]
    assert server.count("offramp_dropped_images_total") == 1
    assert server.count("offramp_mul_adds_total") == COSTS[0]  # and its client has paid for what it used
    [bucket] = server.service.clients._buckets.values()
    assert bucket.held == 0 and bucket.balance < 2e6


def test_a_failing_stage_takes_down_its_own_images_only(start: Start) -> None:
    server = start()
    server.engine.open[2].clear()
    doomed = server.later(picture(1, 2), picture(2, 1))
    assert server.engine.reached[2].wait(5)
    server.engine.failing = True
    server.engine.open[2].set()
    assert doomed.result(5).status_code == 500
    assert doomed.result().json() == {"detail": "the network failed on this request; the server goes on"}
    server.engine.failing = False
    assert labels(server.send(picture(3, 3))) == [3]
    assert server.http.get("/healthz").json() == {"status": "ok"}
    assert server.count("offramp_failed_images_total") == 1 and server.service.taken == 0


def test_a_worker_that_dies_leaves_nobody_waiting(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    monkeypatch.setattr(server.service.worker, "_expire", lambda: 1 / 0)
    assert server.send(picture(1, 1)).status_code == 500
    until(lambda: server.http.get("/healthz").status_code == 503)
    assert server.send(picture(1, 1)).status_code == 503 and server.service.taken == 0


def test_metrics_count_and_drift_shows(start: Start) -> None:
    server = start()
    for _ in range(3):
        server.send(picture(1, 1), picture(1, 2), picture(1, 3), picture(1, 1))
    server.send(picture(1, 3), max_exit=1)
    server.send(b"no image")
    assert server.count("offramp_images_total") == 13
    assert [server.count(f'offramp_exit_images_total{{exit="{k}"}}') for k in (1, 2, 3)] == [7, 3, 3]
    assert server.count("offramp_forced_images_total") == 1
    assert server.count('offramp_requests_total{status="200"}') == 4
    assert server.count('offramp_requests_total{status="415"}') == 1
    assert server.count("offramp_request_seconds_count") == 5
    assert server.count("offramp_queue_images") == 0
    assert np.isnan(server.count("offramp_share_drift"))
    for _ in range(20):
        server.send(*[picture(1, 1)] * 49, picture(1, 2))
    assert server.count("offramp_share_drift") == pytest.approx(0.48, abs=0.01)
    found = server.http.get("/shares").json()
    assert found == {"images": 1000, "shares": [0.98, 0.02, 0.0], "calibration": [0.5, 0.3, 0.2]}
