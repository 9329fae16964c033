"""What surrounds Ray, without Ray: words, addresses, room for workers, what is printed, a missing extra."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from helpers.server import until
from offramp.cli.app import with_ray_address
from offramp.common.console import only_ours, say
from offramp.common.ray_connection import RayFailed
from offramp.scaling.cluster import WorkerShape, _room, ray_cluster


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("predict b s --ray --out o", "predict b s --ray=local --out o"),
        ("predict --ray b s", "predict --ray=local b s"),
        ("predict b s --ray", "predict b s --ray=local"),
        ("predict b s --ray 10.0.0.1:6379 --out o", "predict b s --ray 10.0.0.1:6379 --out o"),
        ("predict --ray auto b s", "predict --ray auto b s"),
        ("predict --ray ray://h:1 b s", "predict --ray ray://h:1 b s"),
        ("predict --ray=h:1 b s", "predict --ray=h:1 b s"),
        ("predict b -- --ray", "predict b -- --ray"),
        ("predict --ray s3://bucket/x", "predict --ray=local s3://bucket/x"),
    ],
)
def test_an_address_may_follow_ray_or_not(given: str, read: str) -> None:
    assert with_ray_address(given.split()) == read.split()


def test_as_many_workers_as_fit() -> None:
    assert _room({"CPU": 8.0}, WorkerShape()) == 8
    assert _room({"CPU": 8.0}, WorkerShape(cpus=3)) == 2
    assert _room({"CPU": 64.0, "GPU": 2.0}, WorkerShape(gpus=0.25)) == 8
    assert _room({"CPU": 4.0, "GPU": 2.0}, WorkerShape(gpus=0.25)) == 4
    assert _room({"CPU": 0.5}, WorkerShape()) == 1
    for wrong in ({"workers": 0}, {"cpus": 0}, {"gpus": -1}):
        with pytest.raises(ValueError, match="1 or more|needs some CPUs"):
            WorkerShape(**wrong)  # type: ignore[arg-type]


SMALL_CLUSTER = """
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from offramp.common.console import log_to_console, say
from offramp.scaling import cluster

nodes = [{"Alive": True, "Resources": {"CPU": 2.0}}, {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}]
sys.modules["ray"] = SimpleNamespace(nodes=lambda: nodes, cluster_resources=lambda: {"CPU": 2.0})
cluster.ray_connection = lambda *given, **more: nullcontext()
log_to_console()
for shape in (cluster.WorkerShape(cpus=2), cluster.WorkerShape(gpus=1)):
    with cluster.ray_cluster("local", shape) as room:
        say(f"{room} workers")
"""


def test_workers_that_fit_nowhere_are_said() -> None:
    """On standard error, as the command line sets it up, although all that Ray says is kept from there."""
    done = subprocess.run([sys.executable, "-c", SMALL_CLUSTER], capture_output=True, text=True, timeout=60)
    assert done.stdout == "1 workers\n1 workers\n", done.stderr
    said = " ".join(done.stderr.split())
    assert said.count("no machine of the cluster has the") == 1
    assert "has the 1 CPUs and 1 GPUs of a worker (there: 2 CPUs and 0 GPUs); waiting" in said


JOIN = """
import os, sys
from offramp.common.ray_connection import ray_connection
with ray_connection(sys.argv[1]):
    import ray
    print("answered", ray.get(ray.remote(lambda: 6 * 7).remote()), os.environ["RAY_AUTH_MODE"])
print("RAY_AUTH_MODE" in os.environ)
"""


def join(address: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", JOIN, address], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_a_token_is_sent_to_clusters_that_ask_for_one(mode: str) -> None:
    """This machine has one, as after any Ray that was started on it; the cluster has it too, or knows of none."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home, socket.socket() as free:  # a short path: sockets lie below it
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        Path(home, ".ray").mkdir()
        Path(home, ".ray", "auth_token").write_text("0123456789abcdef" * 4)
        env = {key: value for key, value in os.environ.items() if key != "RAY_AUTH_MODE"}
        env |= {"HOME": home, "RAY_TMPDIR": home, "RAY_USAGE_STATS_ENABLED": "0"}
        head = ["-m", "ray.scripts.scripts", "start", "--head", f"--port={port}", "--num-cpus=1", "--block"]
        free.close()
        log = Path(home, "log")
        with log.open("w") as said:
            started = {"env": {**env, "RAY_AUTH_MODE": mode}, "stdout": said, "stderr": said}
            ray = subprocess.Popen([sys.executable, *head, "--include-dashboard=false"], **started)
        try:
            until(lambda: "Ray runtime started" in log.read_text() or ray.poll() is not None, 120)
            for address in (f"127.0.0.1:{port}", "auto"):
                found = join(address, env)
                assert found.stdout == f"answered 42 {mode}\nFalse\n", found.stdout + found.stderr + log.read_text()
        finally:
            ray.terminate()  # `ray stop` would end every Ray on this machine
            ray.wait(60)


def test_addresses_that_cannot_be_used_are_said_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(RayFailed, match=f"no Ray listens at {address}"), ray_cluster(address):
            pass
    with pytest.raises(ValueError, match="Ray's client is not used"), ray_cluster("ray://h:1"):
        pass


def test_only_our_lines_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), only_ours():
        print("a library's line")
        print("its warning", file=sys.stderr)
        os.write(2, b"and one from beneath Python\n")
        say("ours")
        raise KeyError
    print("printed afterwards")
    say("said afterwards")
    os.write(2, b"an error afterwards\n")
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["ours", "printed afterwards", "said afterwards"]
    assert err == "an error afterwards\n"


@pytest.mark.parametrize("package", ["ray", "pyarrow"])
def test_a_missing_extra_is_answered_with_its_command(package: str, onnx_bundle: Path, digits: Path) -> None:
    script = (
        f"import sys; sys.modules[{package!r}] = None\n"
        f"sys.argv = ['offramp', 'predict', {str(onnx_bundle)!r}, {str(digits)!r}, '--ray', '--out', "
        f"{str(digits.parent / package)!r}]\n"
        "from offramp.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip() == f"offramp: this needs {package}; install it with: pip install 'offramp[ray]'"
