"""Files by their URI: local, in a store, and what is done when a store does not answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offramp.common.extras import MissingExtra
from offramp.common.images import UnreadableImage
from offramp.scaling import places


def test_names_are_joined_to_folders_and_uris_stand_alone() -> None:
    assert places.joined("/data", "a/b.png") == "/data/a/b.png"
    assert places.joined("/data", "/else/b.png") == "/else/b.png"
    assert places.joined("s3://bucket/x/", "a b.png") == "s3://bucket/x/a b.png"
    assert places.joined("/data", "s3://bucket/b.png") == "s3://bucket/b.png"
    for base in ("/data", "s3://bucket"):
        assert places.joined(base, "file:///else/a b%20.png") == "/else/a b%20.png"
    assert places.as_path("local:///data") == "/data" and places.as_path("s3://b/file://x") == "s3://b/file://x"
    with pytest.raises(ValueError, match="file://data/x names no path of this machine; write file:///PATH"):
        places.as_path("file://data/x")


@pytest.mark.parametrize("store", ["memory", "s3"])
def test_a_store_is_read_and_written_like_a_folder(store: str, request: pytest.FixtureRequest) -> None:
    base = request.getfixturevalue("s3") if store == "s3" else f"memory://{os.urandom(4).hex()}"
    assert places.names_below(base) == [] and places.kind_of(f"{base}/none") == "nothing"
    for name in ("b c#1.PNG", "deep/a.jpg", "notes.txt", "deep/._a.jpg"):
        places.write_whole(f"{base}/{name}", name.encode())
    assert sorted(places.files_below(base)) == ["b c#1.PNG", "deep/a.jpg", "notes.txt"]
    assert places.names_below(base) == ["b c#1.PNG", "notes.txt"]
    assert places.kind_of(base) == "folder" and places.kind_of(f"{base}/deep/a.jpg") == "file"
    assert places.fetched(f"{base}/b c#1.PNG") == b"b c#1.PNG" == places.read_all(f"{base}/b c#1.PNG")
    with pytest.raises(UnreadableImage, match="it is not there"):
        places.fetched(f"{base}/none.png")
    places.remove(f"{base}/notes.txt")
    assert "notes.txt" not in places.names_below(base)


def test_a_store_that_does_not_answer_says_nothing_about_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again, and then it is no unreadable image: the part is not written, and can be done later."""
    tried: list[str] = []

    def failing(place: str) -> None:
        tried.append(place)
        raise OSError("AWS Error NETWORK_CONNECTION during GetObject operation\nmore")

    monkeypatch.setattr(places, "located", failing)
    monkeypatch.setattr(places, "WAIT_S", 0.0)
    with pytest.raises(
        OSError, match="s3://b/k cannot be reached: AWS Error NETWORK_CONNECTION during GetObject operation$"
    ):
        places.fetched("s3://b/k")
    assert len(tried) == places.TRIES

    def refused(place: str) -> None:
        tried.append(place)
        raise OSError("When reading: AWS Error ACCESS_DENIED during GetObject operation")

    tried.clear()
    monkeypatch.setattr(places, "located", refused)
    with pytest.raises(UnreadableImage, match="access to it is refused"):
        places.fetched("s3://b/k")
    assert len(tried) == 1


class Flaky:
    """A file system, or a file of it, of which everything fails once."""

    def __init__(self, real: Any, failed: set[str]) -> None:
        self.real, self.failed = real, failed

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            if name not in (*self.failed, "close"):
                self.failed.add(name)
                raise OSError("AWS Error NETWORK_CONNECTION")
            found = getattr(self.real, name)(*given)
            return Flaky(found, self.failed) if name == "open_input_file" else found

        return call


def test_whatever_a_store_is_asked_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    base, real = f"memory://{os.urandom(4).hex()}", places.located
    monkeypatch.setattr(places, "WAIT_S", 0.0)

    def flaky(ask: Callable[[], Any]) -> tuple[Any, set[str]]:
        failed: set[str] = set()
        monkeypatch.setattr(places, "located", lambda place: (Flaky(real(place)[0], failed), real(place)[1]))
        return ask(), failed

    _, failed = flaky(lambda: places.write_whole(f"{base}/a.txt", b"0123456789"))
    assert failed == {"open_output_stream", "move", "delete_file"}
    assert flaky(lambda: places.names_below(base)) == (["a.txt"], {"get_file_info"})
    assert flaky(lambda: places.kind_of(f"{base}/a.txt")) == ("file", {"get_file_info"})
    for read in (places.read_all, lambda place: places.opened(place).read_at(9, 0) + b"9"):
        found, failed = flaky(lambda read=read: read(f"{base}/a.txt"))  # type: ignore[misc]
        assert found == b"0123456789" and failed >= {"open_input_file", "size", "read_at"}
    _, failed = flaky(lambda: places.remove(f"{base}/a.txt"))
    monkeypatch.undo()
    assert failed == {"delete_file"} and places.names_below(base) == []


def test_what_is_not_written_whole_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file is seen while it is written, it has another name until it is whole."""
    base, real = f"memory://{os.urandom(4).hex()}", places.located
    seen: list[str] = []

    class Watched(Flaky):
        def __getattr__(self, name: str) -> Callable[..., Any]:
            def call(*given: Any) -> Any:
                if name == "move":
                    seen.extend(places.names_below(base))
                    raise KeyboardInterrupt
                return getattr(self.real, name)(*given)

            return call

    monkeypatch.setattr(places, "located", lambda place: (Watched(real(place)[0], set()), real(place)[1]))
    with pytest.raises(KeyboardInterrupt):
        places.write_whole(f"{base}/part.parquet", b"whole")
    assert len(seen) == 1 and seen[0].startswith(".part.parquet.") and places.names_below(base) == []


def test_schemes_that_nobody_reads_are_named() -> None:
    with pytest.raises(ValueError, match="nosuch://x cannot be opened: Protocol not known: nosuch"):
        places.located("nosuch://x")
    with pytest.raises(MissingExtra, match="az://x/y cannot be opened"):
        places.located("az://x/y")


def test_a_local_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "file"
    places.write_whole(str(path), b"before")

    def fail(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        places.write_whole(str(path), b"after")
    assert path.read_bytes() == b"before" and os.listdir(path.parent) == ["file"]
