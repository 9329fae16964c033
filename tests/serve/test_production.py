"""What docs/in-production.md offers: nginx's configuration, run here with a certificate of its own, and alert rules."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from helpers.server import Start, labels, picture, until

FILES = Path(__file__).parents[2] / "docs" / "production"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
PROMTOOL = shutil.which("promtool")
KEYS = {"shop": "1f" * 32, "lab": "2e" * 32}  # as long as `openssl rand -hex 32` draws them


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def written(folder: Path, upstreams: Sequence[int], ports: tuple[int, int]) -> Path:
    """The configuration of the docs at other ports and paths, inside a main one."""
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(folder / "offramp.key"), "-out", str(folder / "offramp.crt")]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(make, check=True, capture_output=True)
    (folder / "offramp-keys.map").write_text("".join(f'"Bearer {key}" {name};\n' for name, key in KEYS.items()))
    text = (FILES / "nginx.conf").read_text()
    one = "server 127.0.0.1:8000 max_fails=0;"
    swaps = {"/etc/nginx/": f"{folder}/", one: " ".join(one.replace("8000", str(port)) for port in upstreams)}
    swaps |= {"listen 80;": f"listen 127.0.0.1:{ports[0]};", "listen 443 ssl": f"listen 127.0.0.1:{ports[1]} ssl"}
    for old, new in swaps.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "offramp").write_text(text)
    paths = "".join(f"{name}_temp_path {folder}/{name};\n" for name in ("proxy", "fastcgi", "uwsgi", "scgi"))
    paths += f"client_body_temp_path {folder}/body;\naccess_log off;\n"
    main = f"pid {folder}/pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
    (folder / "main.conf").write_text(f"{main}http {{\n{paths}include {folder}/offramp;\n}}\n")
    return folder / "main.conf"


@contextmanager
def nginx(folder: Path, *upstreams: int) -> Iterator[tuple[httpx.Client, int]]:
    """A client of nginx in front of servers at these ports, and nginx's plain port."""
    ports = free_port(), free_port()
    words = [NGINX, "-p", str(folder), "-c", str(written(folder, upstreams, ports)), "-g", "daemon off;"]
    checked = subprocess.run([*words[:-2], "-t"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    with subprocess.Popen(words) as process:
        try:
            until(lambda: not socket.socket().connect_ex(("127.0.0.1", ports[1])))
            trusted = ssl.create_default_context(cafile=str(folder / "offramp.crt"))
            base = f"https://localhost:{ports[1]}"
            with httpx.Client(base_url=base, verify=trusted, trust_env=False, timeout=20) as http:
                yield http, ports[0]
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture
def proxied(start: Start, tmp_path: Path) -> Iterator[tuple[httpx.Client, int]]:
    """A client of nginx in front of a server with a ceiling, and nginx's plain port."""
    with nginx(tmp_path, start(client_mul_adds_per_s=500_000, trust_forwarded=True).port) as found:
        yield found


@pytest.mark.slow
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed (apt install nginx-light)")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_nginx_asks_for_a_key_and_hides_what_is_the_operators(proxied: tuple[httpx.Client, int]) -> None:
    http, plain = proxied
    files, key = {"images": picture(4, 1)}, {"authorization": f"Bearer {KEYS['shop']}"}
    for wrong in ({}, {"authorization": "Bearer three"}, {"authorization": "Bearer"}, {"authorization": "one"}):
        refused = http.post("/predict", files=files, headers=wrong)
        assert refused.status_code == 401 and "a key is needed" in refused.json()["detail"]
    answer = http.post("/predict", files=files, headers=key)
    assert labels(answer) == [4] and "max-age" in answer.headers["strict-transport-security"]
    assert http.get("/healthz").json() == {"status": "ok"}
    for hidden in ("/", "/metrics", "/shares", "/openapi.json"):
        assert http.get(hidden, headers=key).status_code == 404
    assert http.post("/predict", content=b"x" * 11_000_000, headers=key).status_code == 413
    moved = httpx.get(f"http://127.0.0.1:{plain}/predict", trust_env=False)
    assert moved.status_code == 301 and moved.headers["location"] == "https://127.0.0.1/predict"


@pytest.mark.slow
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed (apt install nginx-light)")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_behind_nginx_every_key_has_a_ceiling_of_its_own(proxied: tuple[httpx.Client, int]) -> None:
    http, _ = proxied
    tries = (("shop", "1.1.1.1", 200), ("shop", "2.2.2.2", 429), ("lab", "", 200), ("lab", "", 429))
    for client, name, status in tries:
        headers = {"authorization": f"Bearer {KEYS[client]}", "x-forwarded-for": name}
        found = http.post("/predict", files={"images": picture(1, 3)}, headers=headers)
        assert found.status_code == status
    assert int(found.headers["retry-after"]) > 1


@pytest.mark.slow
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed (apt install nginx-light)")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_behind_nginx_another_machine_is_asked_where_one_fails_or_is_gone(start: Start, tmp_path: Path) -> None:
    """As often as it fails: nobody is left alone for a while. One that is full is believed."""
    key, image = {"authorization": f"Bearer {KEYS['shop']}"}, {"images": picture(4, 1)}
    good, failing = start(), start()
    failing.engine.failing = True
    for number, bad in enumerate((failing.port, free_port())):
        (tmp_path / str(number)).mkdir()
        with nginx(tmp_path / str(number), bad, good.port) as (http, _):
            for _ in range(8):
                assert labels(http.post("/predict", files=image, headers=key)) == [4]
    assert failing.count("offramp_failed_images_total") >= 3 and good.count("offramp_images_total") == 16
    full = start(queue=1)
    full.engine.open[1].clear()
    inside = full.later(picture(4, 1))
    until(full.engine.reached[1].is_set)
    with nginx(tmp_path, full.port, good.port) as (http, _):
        answers = [http.post("/predict", files=image, headers=key) for _ in range(4)]
        assert sorted(answer.status_code for answer in answers) == [200, 200, 503, 503]
        assert {answer.headers.get("retry-after") for answer in answers if answer.status_code == 503} == {"1"}
    full.engine.open[1].set()
    assert labels(inside.result()) == [4]


@pytest.mark.slow
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed (apt install nginx-light)")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_behind_nginx_a_key_has_so_many_requests_a_second_and_an_address_so_many_connections(
    start: Start, tmp_path: Path
) -> None:
    server = start()
    with nginx(tmp_path, server.port) as (http, _):

        def asked(client: str) -> int:
            return http.post("/predict", headers={"authorization": f"Bearer {KEYS[client]}"}).status_code

        began = time.monotonic()
        found = [asked("shop") for _ in range(400)]
        let_in, seconds = found.count(415), time.monotonic() - began
        assert set(found) == {415, 429} and 100 <= let_in <= 102 + 50 * seconds
        assert asked("lab") == 415
        time.sleep(0.5)
        assert asked("shop") == 415

        ask = partial(http.post, "/predict", files={"images": picture(4, 1)})
        server.engine.open[1].clear()
        with ThreadPoolExecutor(70) as others:
            key = {"authorization": f"Bearer {KEYS['lab']}"}
            inside = [others.submit(ask, headers=key) for _ in range(70)]
            until(lambda: sum(one.done() for one in inside) == 6)
            server.engine.open[1].set()
        assert sorted(one.result().status_code for one in inside) == [200] * 64 + [429] * 6


def test_alerts_ask_for_metrics_that_exist(start: Start) -> None:
    server = start()
    assert labels(server.send(picture(1, 1))) == [1]
    exported = set(re.findall(r"^(offramp_\w+)", server.http.get("/metrics").text, re.MULTILINE))
    asked = set(re.findall(r"\b(offramp_\w+)", (FILES / "alerts.yml").read_text()))
    assert asked <= exported and len(asked) >= 7


RULES_TEST = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: 'up{{job="offramp", instance="a"}}'
        values: '1x20 0x20'
      - series: 'offramp_requests_total{{job="offramp", status="200"}}'
        values: '0+90x40'
      - series: 'offramp_requests_total{{job="offramp", status="500"}}'
        values: '0x20 10+10x20'
      - series: 'offramp_requests_total{{job="offramp", status="503"}}'
        values: '0x20 20+20x20'
      - series: 'offramp_failed_images_total{{job="offramp"}}'
        values: '0x20 10x20'
    alert_rule_test:
      - {{eval_time: 15m, alertname: OfframpDown, exp_alerts: []}}
      - {{eval_time: 15m, alertname: OfframpErrors, exp_alerts: []}}
      - {{eval_time: 15m, alertname: OfframpFull, exp_alerts: []}}
      - eval_time: 25m
        alertname: OfframpDown
        exp_alerts:
          - exp_labels: {{severity: page, job: offramp, instance: a}}
            exp_annotations: {{summary: "a does not answer /metrics."}}
      - eval_time: 25m
        alertname: OfframpStageFails
        exp_alerts:
          - exp_labels: {{severity: page, job: offramp}}
            exp_annotations: {{summary: "A stage failed on 10 images; the log has the reason."}}
      - eval_time: 39m
        alertname: OfframpErrors
        exp_alerts:
          - exp_labels: {{severity: page, job: offramp}}
            exp_annotations: {{summary: "8.333% of requests fail."}}
      - eval_time: 39m
        alertname: OfframpFull
        exp_alerts:
          - exp_labels: {{severity: page, job: offramp}}
            exp_annotations:
              summary: "16.67% of requests find the queue full: more workers or replicas are needed."
  - interval: 1m
    input_series:
      - series: 'offramp_request_seconds_bucket{{job="offramp", le="1.0"}}'
        values: '0+100x20 2000+10x50'
      - series: 'offramp_request_seconds_bucket{{job="offramp", le="2.0"}}'
        values: '0+100x70'
      - series: 'offramp_request_seconds_bucket{{job="offramp", le="+Inf"}}'
        values: '0+100x70'
      - series: 'offramp_images_total{{job="offramp"}}'
        values: '0+100x70'
      - series: 'offramp_overload_images_total{{job="offramp"}}'
        values: '0x20 0+30x50'
      - series: 'offramp_requests_total{{job="offramp", status="200"}}'
        values: '0+50x70'
      - series: 'offramp_requests_total{{job="offramp", status="429"}}'
        values: '0x20 0+50x50'
      - series: 'offramp_share_drift{{job="offramp"}}'
        values: '0.05x20 0.2x50'
    alert_rule_test:
      - {{eval_time: 20m, alertname: OfframpSlow, exp_alerts: []}}
      - {{eval_time: 20m, alertname: OfframpOverload, exp_alerts: []}}
      - {{eval_time: 20m, alertname: OfframpCeiling, exp_alerts: []}}
      - {{eval_time: 40m, alertname: OfframpDrift, exp_alerts: []}}
      - eval_time: 60m
        alertname: OfframpSlow
        exp_alerts:
          - exp_labels: {{severity: ticket, job: offramp}}
            exp_annotations: {{summary: "One request in twenty takes more than 1.944s."}}
      - eval_time: 60m
        alertname: OfframpOverload
        exp_alerts:
          - exp_labels: {{severity: ticket, job: offramp}}
            exp_annotations:
              summary: "30% of images are answered early because more than half the queue is taken."
      - eval_time: 60m
        alertname: OfframpCeiling
        exp_alerts:
          - exp_labels: {{severity: ticket, job: offramp}}
            exp_annotations:
              summary: "50% of requests are over their client's ceiling: an attack, or a ceiling too low."
      - eval_time: 60m
        alertname: OfframpDrift
        exp_alerts:
          - exp_labels: {{severity: ticket, job: offramp}}
            exp_annotations:
              summary: "Images leave elsewhere than on the calibration split (distance 0.20): calibrate again
                on images as they are now."
"""


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (apt install prometheus)")
def test_alert_rules_are_rules_and_fire(tmp_path: Path, start: Start) -> None:
    rules = FILES / "alerts.yml"
    assert PROMTOOL is not None
    for alert in re.findall(r"- alert: (\w+)", rules.read_text()):
        assert re.search(rf"alertname: {alert}\n *exp_alerts:\n", RULES_TEST), f"nothing shows that {alert} fires"
    found = subprocess.run([PROMTOOL, "check", "rules", str(rules)], capture_output=True, text=True)
    assert found.returncode == 0 and "10 rules found" in found.stdout, found.stdout + found.stderr
    (tmp_path / "test.yml").write_text(RULES_TEST.format(rules=rules))
    found = subprocess.run([PROMTOOL, "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    server = start()
    assert labels(server.send(picture(1, 1))) == [1]
    text = server.http.get("/metrics").text
    found = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
