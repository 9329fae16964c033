"""Large predictions on a real Ray, killed in every way: nothing is lost, nothing is written twice, by keys."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from helpers.digit_files import linked_digits
from offramp import load_bundle
from offramp.running.predict import predict
from offramp.scaling.parts import FOOTER

PART = 1024
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def digits_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    return lambda count: linked_digits(tmp_path_factory.mktemp("many") / "digits", count)


def start(bundle: Path, source: Path, out: Path, *more: object) -> subprocess.Popen[str]:
    shape = ["--workers", 2, "--part-images", PART, "--device", "cpu"]
    words = ["predict", bundle, source, "--ray", *shape, "--out", out, *more]
    command = [sys.executable, "-m", "offramp", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def start_until(bundle: Path, source: Path, out: Path, count: int) -> subprocess.Popen[str]:
    """A command that is at work, once so many parts are there; Ray does not always start on a busy machine."""
    for _ in range(4):
        running = start(bundle, source, out)
        wait_until(lambda: len(parts(out)) >= count or running.poll() is not None, f"{count} parts")  # noqa: B023
        if running.poll() is None:
            return running
        said, _ = running.communicate()
        assert "cannot be started" in said, said
    raise AssertionError("Ray cannot be started")


def finish(running: subprocess.Popen[str]) -> str:
    said, _ = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 0, said
    assert "raylet" not in said and "Ray" not in said.replace("Ray on this machine", ""), said  # its noise
    return said


def parts(out: Path) -> dict[str, int]:
    """The parts that are there, and when each was written."""
    return {path.name: path.stat().st_mtime_ns for path in out.glob("part-*.parquet")}


def wait_until(true: Callable[[], bool], what: str, running: subprocess.Popen[str] | None = None) -> None:
    until = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < until, f"{what}: not within {LIMIT_S:.0f} s"
        assert running is None or running.poll() is None, f"{what}: it ended before"
        time.sleep(0.05)


def workers(out: Path) -> set[int]:
    """The processes that wrote the parts that are there."""
    abouts = [json.loads(pq.read_metadata(out / name).metadata[FOOTER]) for name in parts(out)]
    return {int(about["worker"].split(":")[1]) for about in abouts}


def is_alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def check_whole(bundle: Path, source: Path, out: Path) -> None:
    """Every key once and in its part, every answer that of a plain prediction, nothing half written."""
    keys = sorted(path.name for path in source.iterdir())
    names = sorted(parts(out))
    assert names == [f"part-{at:06d}.parquet" for at in range(-(-len(keys) // PART))]
    found = {}
    for at, name in enumerate(names):
        rows = pq.read_table(out / name).to_pylist()
        assert [row["key"] for row in rows] == keys[at * PART : (at + 1) * PART]
        found |= {row["key"]: row for row in rows}
    assert len(found) == len(keys) and not list(out.glob(".*"))
    some = keys[:: max(1, len(keys) // 400)]
    plain = predict(load_bundle(bundle, device="cpu", threads=1), [str(source / key) for key in some])
    assert [(found[key]["label"], found[key]["exit"]) for key in some] == [(row.label, row.exit) for row in plain.rows]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx_bundle", "torch_bundle"])
def test_a_worker_is_killed_and_the_command_ends_well(
    kind: str, request: pytest.FixtureRequest, digits_of: Callable[[int], Path], tmp_path: Path
) -> None:
    """Nothing else is: another worker does the part that was lost, and every key is there once."""
    bundle, source, out = request.getfixturevalue(kind), digits_of(12 * PART - 7), tmp_path / "out"
    running = start_until(bundle, source, out, 2)
    killed = min(workers(out))
    os.kill(killed, signal.SIGKILL)
    said = finish(running)
    assert "12,281 images in 12 parts, 0 of them could not be read" in said
    assert workers(out) - {killed} and not is_alive(killed)
    check_whole(bundle, source, out)


@pytest.mark.slow
def test_a_worker_and_then_everything_is_killed_and_it_goes_on(
    onnx_bundle: Path, digits_of: Callable[[int], Path], tmp_path: Path
) -> None:
    source, out = digits_of(24 * PART - 7), tmp_path / "out"
    running = start_until(onnx_bundle, source, out, 2)
    first = workers(out)
    os.kill(min(first), signal.SIGKILL)
    wait_until(lambda: len(parts(out)) >= 6, "six parts", running)
    running.kill()
    running.communicate()
    wait_until(lambda: not any(map(is_alive, workers(out))), "workers end with the command")
    kept = parts(out)
    assert 6 <= len(kept) < 24
    said = finish(start(onnx_bundle, source, out))
    assert f"{len(kept)} parts are finished" in said and "24,569 images in 24 parts, 0 of them" in said
    assert {name: parts(out)[name] for name in kept} == kept, "a finished part was written again"
    check_whole(onnx_bundle, source, out)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_with_a_sentence_and_no_process_stays(
    signum: int, onnx_bundle: Path, digits_of: Callable[[int], Path], tmp_path: Path
) -> None:
    source, out = digits_of(24 * PART), tmp_path / "out"
    running = start_until(onnx_bundle, source, out, 2)
    running.send_signal(signum)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 128 + signum
    assert said.rstrip().endswith("offramp: stopped; what is finished is kept, and the same command goes on")
    wait_until(lambda: not any(map(is_alive, workers(out))), "workers end with the command")


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_killed_at_random_again_and_again(onnx_bundle: Path, digits_of: Callable[[int], Path], tmp_path: Path) -> None:
    """Workers and the command, at moments that are drawn; every start keeps what was there before it."""
    count = 120
    source, out, draw = digits_of(count * PART + 1), tmp_path / "out", random.Random(0)
    for rounds in range(8):
        before = parts(out)
        if len(before) > 0.8 * count:  # a fast machine: what is left would be done before it is killed
            assert rounds >= 3
            break
        running = start_until(onnx_bundle, source, out, len(before) + 1)
        for _ in range(draw.randrange(3)):
            time.sleep(draw.random() * 3)
            alive = [process for process in workers(out) if is_alive(process)]
            if alive:
                os.kill(draw.choice(alive), signal.SIGKILL)
        time.sleep(draw.random() * 4)
        running.send_signal(draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        running.communicate(timeout=120)
        assert {name: parts(out)[name] for name in before} == before
    kept = parts(out)
    assert 8 <= len(kept) <= count
    finish(start(onnx_bundle, source, out))
    assert {name: parts(out)[name] for name in kept} == kept
    check_whole(onnx_bundle, source, out)


CLUSTER = """
import sys, threading, time
from pathlib import Path
from ray.cluster_utils import Cluster
from offramp.scaling.cluster import WorkerShape
from offramp.scaling.offline import Asked, predict_source
from offramp.scaling.sources import open_source

bundle, source, out = sys.argv[1:]
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=cpus) for cpus in (1, 2)]  # unlike machines
cluster.wait_for_nodes()

def fail_later():
    while len(list(Path(out).glob("part-*"))) < 4:
        time.sleep(0.1)
    cluster.remove_node(nodes[1], allow_graceful=False)

threading.Thread(target=fail_later, daemon=True).start()
where = {"address": cluster.address, "shape": WorkerShape()}
found = predict_source(bundle, open_source(source), out, Asked(device="cpu"), **where)
print("images", found.images, "nodes left", len(cluster.list_all_nodes()))
cluster.shutdown()
"""


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_node_of_a_cluster_is_lost(onnx_bundle: Path, digits_of: Callable[[int], Path], tmp_path: Path) -> None:
    source, out = digits_of(40 * PART), tmp_path / "out"
    command = [sys.executable, "-c", CLUSTER, str(onnx_bundle), str(source), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"images {40 * PART} nodes left 2" in done.stdout
    check_whole(onnx_bundle, source, out)


@pytest.mark.slow
def test_labelled_images_are_judged_by_workers(onnx_bundle: Path) -> None:
    """The score of one process, by two workers of a real Ray."""
    words = ["-m", "offramp", "eval", onnx_bundle, "--data", "digits", "--set", "data.test=3000", "--device", "cpu"]
    run = partial(subprocess.run, capture_output=True, text=True, timeout=LIMIT_S)
    plain, on_ray = (run([sys.executable, *words, *more]) for more in ([], ["--ray", "local", "--workers", "2"]))
    assert plain.returncode == on_ray.returncode == 0, plain.stderr + on_ray.stdout + on_ray.stderr
    # one of them may have done all before the other had started
    assert re.search(r"3,000 images now: [\d,]+ images/s for each of [12] workers", on_ray.stdout)
    assert plain.stdout.split("on 3,000 images")[1] == on_ray.stdout.split("on 3,000 images")[1]


FATAL = """
import os, sys
from offramp.scaling.cluster import Task, WorkerShape, ray_cluster, spread

class Fatal:
    def __call__(self, number, data):
        if number == 3:
            os._exit(1)
        return data

shape = WorkerShape(workers=2)
seen = []
try:
    with ray_cluster("local", shape) as workers:
        for found in spread(Fatal, (), [Task(at, b"x") for at in range(6)], workers, shape):
            seen.append(found.number)
except OSError as error:
    print("said:", error)
print("seen:", sorted(seen))
"""


@pytest.mark.slow
def test_a_task_that_ends_its_worker_every_time_stops_the_whole(tmp_path: Path) -> None:
    """It is not begun for ever, and the sentence says which one it is."""
    (tmp_path / "fatal.py").write_text(FATAL)
    done = subprocess.run([sys.executable, tmp_path / "fatal.py"], capture_output=True, text=True, timeout=LIMIT_S)
    assert "said: task 3 ended its worker 5 times" in done.stdout, done.stdout + done.stderr
    assert not done.stderr.strip()
