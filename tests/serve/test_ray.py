"""Ray Serve: the same application in replicas, under load while a new one is rolled out, a replica and a node die."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from helpers.runs import call
from helpers.server import labels, picture, until
from offramp import load_bundle
from offramp.common.files import read_json, sha256, write_json
from offramp.serve import ServeConfig
from offramp.serve.processes import Job
from offramp.serve.ray_app import TELL_S, Counts, Replicas
from offramp.serve.run import BUNDLE_APP, app_words, bundle_app
from offramp.serve.service import PIXEL_MUL_ADDS

ray = pytest.importorskip("ray", reason="Ray is not installed (offramp[ray])")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
NOTICED_S = 3.0  # until Ray knows that a node is gone; docs/serving.md says so
APP = f"offramp-test-{os.getpid()}"  # tests beside this one have replicas too
DOCS = Path(__file__).parents[2] / "docs" / "serving.md"


def test_replicas_are_a_number_or_a_range(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert Replicas.parse("3") == Replicas(3, 3) and Replicas.parse("1:8") == Replicas(1, 8)
    for bad in ("", "0", "x", "4:2", "0:3", "1:2:3"):
        with pytest.raises(ValueError, match="--replicas"):
            Replicas.parse(bad)
    assert call(monkeypatch, "serve", "bundle", "--replicas", "2") == 2
    assert "--replicas needs --ray" in capsys.readouterr().err
    for own in ("--workers", "--threads"):
        assert call(monkeypatch, "serve", "bundle", "--ray", own, "2") == 2
        assert "with --ray give --replicas" in capsys.readouterr().err
    assert call(monkeypatch, "serve", "no-such-bundle", "--ray", "--replicas", "2") == 2
    assert "no-such-bundle" in capsys.readouterr().err


def test_a_cluster_that_is_not_there_is_a_sentence(
    onnx_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "serve", onnx_bundle, "--ray", "127.0.0.1:9") == 2
    assert "no Ray listens at 127.0.0.1:9" in capsys.readouterr().err
    assert call(monkeypatch, "serve", onnx_bundle, "--ray", "ray://127.0.0.1:9") == 2
    assert "Ray's client is not used" in capsys.readouterr().err


def test_a_bundle_that_does_not_answer_never_reaches_ray(
    onnx_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole by its digests, and yet no network: replicas of it would take the place of those that work."""
    bad = shutil.copytree(onnx_bundle, tmp_path / "bad")
    stage = max(bad.glob("stage-*.onnx"))
    stage.write_bytes(stage.read_bytes()[:-100])
    manifest = read_json(bad / "bundle.json")
    manifest["files"][stage.name] = sha256(stage)
    write_json(bad / "bundle.json", manifest)
    assert call(monkeypatch, "serve", bad, "--ray", "127.0.0.1:9") == 2
    said = capsys.readouterr().err
    assert str(bad) in said.replace("\n", "") and "no Ray listens" not in said


def test_a_ceiling_is_divided_by_the_most_replicas(onnx_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offramp.serve import ray_app

    seen: dict[str, Any] = {}
    monkeypatch.setattr(ray_app, "ray_here", lambda address, cpus: nullcontext(seen.update(cpus=cpus)))
    monkeypatch.setattr(ray_app, "deploy", lambda job, *rest: seen.update(job.words) or "http://somewhere")
    config = ServeConfig(queue=100, client_mul_adds_per_s=100e6)
    ray_app.serve_on_ray(onnx_bundle, "somewhere:1", Replicas(1, 4, cpus=3.0), config=config)
    assert seen["settings"]["client_mul_adds_per_s"] == 25e6 and seen["settings"]["queue"] == 100
    assert seen["threads"] == 3 and seen["cpus"] == 12


def test_a_replica_serves_the_bundle_that_was_checked_and_no_other(onnx_bundle: Path, torch_bundle: Path) -> None:
    """The folder of another machine may hold another, or this one's by the time that a replica is replaced."""
    words = app_words(onnx_bundle, ServeConfig(), "cpu", 1)
    digest = load_bundle(onnx_bundle, device="cpu").digest
    assert bundle_app(**words, digest=digest).title == "offramp"
    with pytest.raises(ValueError, match=f"{torch_bundle} on {socket.gethostname()} is another bundle than the one"):
        bundle_app(**{**words, "bundle_path": str(torch_bundle)}, digest=digest)


@pytest.mark.parametrize("free", [0.0, 1.0])
def test_a_cluster_without_room_for_a_roll_out_is_said(
    free: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ray import serve

    from offramp.serve.ray_app import _say_if_too_small

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1.0 + free})
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": free})
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={"offramp": None}))
    _say_if_too_small(Replicas(), "another")
    assert not caplog.text
    _say_if_too_small(Replicas(), "offramp")
    said = "no 1 CPUs and 0 GPUs free for a new replica beside those that serve; waiting for them"
    assert (said in caplog.text) == (free == 0.0)
    _say_if_too_small(Replicas(3, 3), "another")
    assert "too few for 3 replicas of 1 CPUs and 0 GPUs each; waiting for more" in caplog.text


def test_counts_of_replicas_that_are_gone_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from offramp.serve import ray_app
    from offramp.serve.metrics import QUEUE, SLOTS

    now = [0.0]
    monkeypatch.setattr(ray_app.time, "monotonic", lambda: now[0])
    counts, row = Counts(), np.zeros(SLOTS)
    row[0], row[QUEUE] = 5, 3
    for name in "ab":
        counts.tell(name, row.tobytes())

    def summed(who: str) -> np.ndarray:
        return np.sum([np.frombuffer(one) for one in counts.others(who)], axis=0)

    assert (summed("a")[0], summed("a")[QUEUE], summed("c")[0]) == (5, 3, 10)
    now[0] = 20.0
    counts.tell("a", row.tobytes())
    assert (summed("c")[0], summed("c")[QUEUE]) == (10, 3)  # b was silent: what it had inside is gone
    now[0] = 1e6
    assert (summed("c")[0], len(counts.rows)) == (10, 0)


@dataclass
class Attempt:
    """One request of the documented client."""

    began: float
    ended: float
    status: int  # 0: no connection, or one that broke off


@dataclass
class Load:
    """Clients of the documentation, each with one image after another, and all they saw."""

    url: str
    clients: int = 6
    attempts: list[Attempt] = field(default_factory=list)
    asked: int = 0
    wrong: list[Any] = field(default_factory=list)
    missing: list[BaseException] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    deaths: list[tuple[float, float]] = field(default_factory=list)  # of replicas: last seen alive, first seen gone

    def __enter__(self) -> Load:
        [code] = re.findall(r"```py\n(import base64.*?)```", DOCS.read_text(), re.DOTALL)
        self._code: dict[str, Any] = {}
        exec(compile(code, str(DOCS), "exec"), self._code)
        self._open = urllib.request.urlopen
        urllib.request.urlopen = self._watched
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(n,)) for n in range(self.clients)]
        self._threads.append(threading.Thread(target=self._watch))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(200)
        urllib.request.urlopen = self._open

    def _watched(self, *given: Any, **more: Any) -> Any:
        began, status = time.monotonic(), 0
        try:
            found = self._open(*given, **more)
            status = found.status
            return found
        except urllib.error.HTTPError as error:
            status = error.code
            raise
        finally:
            self.attempts.append(Attempt(began, time.monotonic(), status))

    def _client(self, number: int) -> None:
        while not self._stop.is_set():
            number += 1
            label = number % 10
            self.asked += 1
            try:
                answer = self._code["classify"](self.url, picture(label, 1 + number % 3))
            except Exception as error:
                self.missing.append(error)
                continue
            self.answers.append(answer)
            if [found["class"] for found in answer["predictions"]] != [label]:
                self.wrong.append((label, answer))

    def _watch(self) -> None:
        """Note when replicas end."""
        seen, at = set(replica_pids()), time.monotonic()
        while not self._stop.wait(0.2):
            now, alive = time.monotonic(), set(replica_pids())
            self.deaths += [(at, now)] * len(seen - alive)
            seen, at = alive, now

    def failed(self, since: int = 0) -> list[Attempt]:
        return [attempt for attempt in self.attempts[since:] if attempt.status not in (200, 429, 503)]

    def outlived(self, attempt: Attempt) -> bool:
        """Whether no replica ended while this request was under way, nor so shortly before that Ray may not know."""
        return not any(attempt.began <= gone + NOTICED_S and attempt.ended >= alive for alive, gone in self.deaths)

    def answered_just_before_a_death(self) -> int:
        """How many requests, at most, a replica answered between its last report and its death."""
        spans = [(alive - 2 * TELL_S, gone) for alive, gone in self.deaths]
        ended = [attempt.ended for attempt in self.attempts if attempt.status == 200]
        return sum(any(begin <= at <= end for begin, end in spans) for at in ended)

    def report(self, what: str, since: int) -> str:
        bad = self.failed(since)
        refused = sum(attempt.status in (429, 503) for attempt in self.attempts[since:])
        return (
            f"{what}: {len(self.attempts) - since} requests, {len(bad)} failed {sorted({one.status for one in bad})}, "
            f"{sum(map(self.outlived, bad))} of them not inside what died, {refused} refused, "
            f"{len(self.wrong)} wrong, {len(self.missing)} missing"
        )


def counted(url: str) -> int:
    """The images that all replicas together say they answered."""
    found = re.search(r"^offramp_images_total (\S+)$", httpx.get(f"{url}/metrics", trust_env=False).text, re.MULTILINE)
    return int(float(found.group(1))) if found else 0


def replica_pids() -> list[int]:
    """The processes of replicas, which Ray names so."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if words.startswith(f"ray::ServeReplica:{APP}:"):
            found.append(int(pid))
    return found


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Three nodes on this machine: the first has the proxy, the others the replicas."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def under_load(cluster: Any, seconds: float, rounds: int) -> list[str]:
    """Roll out, kill a replica, kill a node, so many times, with clients at work; what was seen."""
    from offramp.serve.ray_app import deploy, ray_here

    said = []
    nodes = [cluster.add_node(num_cpus=3) for _ in range(2)]
    cluster.wait_for_nodes()
    with ray_here(cluster.address):
        config = ServeConfig()

        def put(reveal: bool) -> str:
            words = {"delay_s": 0.005, "reveal_exit": reveal}
            return deploy(Job("helpers.server:fake_app", words), Replicas(3, 3), config, port=0, name=APP)

        url = put(reveal=False)
        with Load(url) as load:

            def phase(what: str, act: Callable[[], object]) -> list[Attempt]:
                time.sleep(seconds)
                since = len(load.attempts)
                act()
                time.sleep(seconds)
                said.append(load.report(what, since))
                print(said[-1])
                assert not load.wrong and not load.missing and len(load.attempts) > since + 10, said
                assert not any(map(load.outlived, load.failed(since))), said
                return load.failed(since)

            for reveal in [True, False, True, False, True][:rounds]:
                assert not phase("new bundle", partial(put, reveal))
                assert ("exit" in load.answers[-1]["predictions"][0]) == reveal
                until(lambda: len(replica_pids()) == 3, 60)
                bad = phase("replica killed", lambda: os.kill(replica_pids()[0], signal.SIGKILL))
                assert len(bad) <= load.clients
                until(lambda: len(replica_pids()) == 3, 60)
                bad = phase("node killed", partial(cluster.remove_node, nodes.pop(0), allow_graceful=False))
                assert len(bad) <= load.clients
                nodes.append(cluster.add_node(num_cpus=3))
                until(lambda: len(replica_pids()) == 3, 120)
        time.sleep(1.5)
        seen, lost = counted(url), load.answered_just_before_a_death()
        said.append(
            f"{load.asked} asked, {len(load.answers)} answered, {len(load.wrong)} wrong; {seen} counted, and a replica "
            f"that was killed may not have told of up to {lost}"
        )
        assert load.asked == len(load.answers)
        assert len(load.answers) - lost <= seen <= len(load.answers) + len(load.failed()), said
    print("\n".join(said))
    return said


@pytest.mark.slow
def test_no_answer_is_wrong_or_missing_while_things_die(cluster: Any) -> None:
    under_load(cluster, seconds=6.0, rounds=1)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_no_answer_is_wrong_or_missing_while_things_die_again_and_again(cluster: Any) -> None:
    under_load(cluster, seconds=15.0, rounds=5)


@pytest.mark.slow
def test_one_replica_is_replaced_under_load_and_every_answer_is_counted(
    cluster: Any, onnx_bundle: Path, tmp_path: Path
) -> None:
    """Two good applications in turn; one that no replica can make, whose place the old one keeps; and a good one.

    They report so seldom that only what they tell at their end is known of those that are gone.
    """
    from offramp.serve.ray_app import deploy, ray_here, remove

    (tmp_path / "silent.py").write_text("from offramp.serve import ray_app\nray_app.TELL_S = 600.0\n")
    cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    with ray_here(cluster.address):

        def put(job: Job) -> str:
            return deploy(job, Replicas(), ServeConfig(), port=0, name=APP)

        def good(reveal: bool) -> Job:
            words = {"delay_s": 0.005, "reveal_exit": reveal}
            return Job("helpers.server:fake_app", words, [str(tmp_path / "silent.py")])

        def reveals() -> bool:
            until(lambda: len(replica_pids()) == 1, 60)
            time.sleep(3)
            return "exit" in load.answers[-1]["predictions"][0]

        url = put(good(False))
        with Load(url) as load:
            time.sleep(3)
            put(good(True))
            assert reveals()
            put(good(False))
            assert not reveals()
            bad = {**app_words(onnx_bundle, ServeConfig(), "cpu", 1), "digest": "another"}
            with pytest.raises(ValueError, match="cannot be served on Ray: .*is another bundle than the one to be"):
                put(Job(BUNDLE_APP, bad))
            before = len(load.answers)
            assert not reveals() and len(load.answers) > before + 10
            put(good(True))
            assert reveals()
        print(load.report("one replica, four roll-outs", 0))
        assert {attempt.status for attempt in load.attempts} == {200} and not load.wrong and not load.missing
        until(lambda: counted(url) == len(load.answers) == load.asked, 5)
        assert count_actors() == [f"{APP}-counts"]
        remove(APP)
        assert count_actors() == []


def count_actors() -> list[str]:
    """Those that count, without the version in their names."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [re.sub(r"-[^-]+-\d+$", "", actor["name"]) for actor in actors if "counts" in actor["name"]]


@pytest.mark.slow
def test_replicas_come_while_requests_wait_and_the_end_answers_what_is_inside(cluster: Any) -> None:
    from offramp.serve.ray_app import deploy, ray_here, remove

    cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    with ray_here(cluster.address):
        job, config = Job("helpers.server:fake_app", {"delay_s": 0.3}), ServeConfig(queue=32)
        url = deploy(job, Replicas(1, 2), config, port=0, name=APP)
        assert len(replica_pids()) == 1
        with Load(url, clients=12) as load:
            until(lambda: len(replica_pids()) == 2, 90)
            time.sleep(5)
            since = len(load.attempts)
            time.sleep(3)
        assert not load.wrong and not load.missing and len(load.attempts) > since
        with ThreadPoolExecutor(8) as others:
            ask = partial(httpx.post, f"{url}/predict", files={"images": picture(6, 3)}, trust_env=False, timeout=30)
            inside = [others.submit(ask) for _ in range(8)]
            time.sleep(0.6)
            remove(APP)
            assert [labels(one.result()) for one in inside] == [[6]] * 8
        until(lambda: not replica_pids(), 30)


@pytest.mark.slow
def test_a_ray_of_its_own_serves_and_ends_well(onnx_bundle: Path) -> None:
    """Each client has compute for one image, and does not get more by another name in its headers."""
    image = picture(4, 1, side=32)
    share = (PIXEL_MUL_ADDS * 32 * 32 + load_bundle(onnx_bundle, device="cpu").costs[0]) // 3
    words = ["serve", str(onnx_bundle), "--ray", "--replicas", "1:2", "--port", "0", "--reveal-exit"]
    words += ["--client-mul-adds-per-s", str(2 * share)]  # it is divided by the most replicas
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "offramp", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found is not None and "with 1 to 2 replicas (Ctrl-C stops)" in line, process.communicate()
        try:
            with httpx.Client(base_url=found.group(), trust_env=False, timeout=30) as http:
                answer, again = (
                    http.post("/predict", files={"images": image}, headers={"x-forwarded-for": name})
                    for name in ("1.1.1.1", "2.2.2.2")
                )
                assert len(labels(answer)) == 1 and answer.json()["predictions"][0]["exit"] >= 1
                assert again.status_code == 429
                time.sleep(int(again.headers["retry-after"]))
                assert http.post("/predict", files={"images": b"no image"}).status_code == 415
                assert http.get("/healthz").json() == {"status": "ok"}
                until(lambda: "offramp_images_total 1.0" in http.get("/metrics").text)
                assert http.get("/shares").json()["images"] == 1
        finally:
            process.send_signal(signal.SIGTERM)
        said, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and said == "stopped\n", (said, errors)


@pytest.mark.slow
def test_on_a_cluster_the_command_returns_and_is_repeated_with_another_bundle(
    cluster: Any, onnx_bundle: Path, torch_bundle: Path
) -> None:
    cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_ADDRESS": cluster.address}

    def offramp(*words: object) -> str:
        command = [sys.executable, "-m", "offramp", *map(str, words)]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=200).stdout

    said = offramp("serve", onnx_bundle, "--ray", cluster.address, "--port", "0", "--reveal-exit")
    found = re.search(r"http://\S+", said)
    assert found is not None and "with 1 replica; it stays" in said
    with httpx.Client(base_url=found.group(), trust_env=False, timeout=30) as http:
        images = {"images": picture(4, 1, side=32)}
        assert "exit" in http.post("/predict", files=images).json()["predictions"][0]
        assert found.group() in offramp("serve", torch_bundle, "--ray", cluster.address)  # the address stays too
        until(lambda: "exit" not in http.post("/predict", files=images).json()["predictions"][0], 30)
        [off] = re.findall(r'`python -c "(.*?)"`', DOCS.read_text())
        subprocess.run([sys.executable, "-c", off], env=environment, check=True, capture_output=True, timeout=100)
        until(lambda: http.post("/predict", files=images).status_code == 404, 30)
