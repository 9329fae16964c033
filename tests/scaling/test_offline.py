"""Large predictions without a cluster: the same answers as `predict`, in parts that a second start goes on with."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import PngImagePlugin

from helpers.runs import call
from offramp import load_bundle
from offramp.common.ray_connection import RayFailed
from offramp.running.predict import expand, predict
from offramp.scaling import offline
from offramp.scaling.offline import Asked, PackedBundle, part_images_for, predict_source
from offramp.scaling.parts import SCHEMA, PartCount, Totals
from offramp.scaling.places import names_below, read_all, write_whole
from offramp.scaling.sources import open_source

SMALL = Asked(part_images=64, batch=16, device="cpu")


def rows_of(out: Path) -> list[dict[str, Any]]:
    """All rows, part by part."""
    tables = [pq.read_table(path) for path in sorted(out.glob("part-*.parquet"))]
    assert all(table.schema.equals(SCHEMA) for table in tables)
    return [row for table in tables for row in table.to_pylist()]


def check_keys(out: Path, source: Path) -> list[dict[str, Any]]:
    """Every key of a folder once, in order."""
    rows = rows_of(out)
    wanted = sorted(Path(path).relative_to(source).as_posix() for path in expand([str(source)]))
    assert [row["key"] for row in rows] == wanted
    return rows


@pytest.mark.parametrize("kind", ["torch_bundle", "onnx_bundle"])
def test_answers_are_those_of_predict(
    kind: str, request: pytest.FixtureRequest, digits: Path, tmp_path: Path, in_process: list[int]
) -> None:
    bundle = request.getfixturevalue(kind)
    found = predict_source(bundle, open_source(str(digits)), str(tmp_path / "out"), SMALL)
    rows = check_keys(tmp_path / "out", digits)
    plain = predict(load_bundle(bundle, device="cpu"), [str(digits / row["key"]) for row in rows], batch=16)
    for own, row in zip(rows, plain.rows, strict=True):
        assert (own["label"], own["exit"], own["mul_adds"], own["error"]) == (
            row.label,
            row.exit,
            row.mul_adds,
            row.error,
        )
        assert own["confidence"] == (None if row.confidence is None else pytest.approx(row.confidence, abs=1e-4))
    assert sorted(in_process) == [0, 1, 2, 3] and sorted((tmp_path / "out").iterdir())[0].name == "_predict.json"
    assert pq.read_table(tmp_path / "out").num_rows == 250  # the folder as a whole
    assert (found.images, found.unreadable, found.parts) == (250, 2, 4)
    assert found.shares == pytest.approx(plain.shares)
    assert found.mean_mul_adds == pytest.approx(sum(row.mul_adds or 0 for row in plain.rows) / 248)
    assert "250 images in 4 parts, 2 of them could not be read" in str(found)


def test_the_same_names_elsewhere_are_another_source(digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits, tmp_path / "copy")
    here, there = open_source(str(digits)), open_source(str(tmp_path / "copy"))
    assert here.size == there.size and here.digest != there.digest
    assert here.digest == open_source(f"{digits}/").digest


def test_a_part_of_an_earlier_commands_worker_is_none_of_this_ones() -> None:
    totals = Totals((1, 2), 30)
    for worker, ended in (("old", 90.0), ("new", 112.0), ("other", 111.0)):
        totals.note(PartCount(0, (6, 4), 0, 5.0, worker, ended), 100.0)
    assert (totals.parts, totals.images, totals.new_images, totals.workers) == (3, 30, 20, {"new", "other"})
    assert totals.start_s == 6.0


def test_it_goes_on_wherever_it_was_stopped(
    torch_bundle: Path, digits: Path, tmp_path: Path, in_process: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before, while and after every part is written: what is there is kept, the rest is done, none twice."""
    out, real = tmp_path / "out", offline.write_whole
    whole = predict_source(torch_bundle, open_source(str(digits)), str(tmp_path / "whole"), SMALL)
    written: Counter[str] = Counter()
    for after in (False, True, False, True, False):

        def stopping(place: str, data: bytes, after: bool = after) -> None:
            if after:
                written[place] += 1
                real(place, data)
            raise KeyboardInterrupt

        monkeypatch.setattr(offline, "write_whole", stopping)
        with pytest.raises(KeyboardInterrupt):
            predict_source(torch_bundle, open_source(str(digits)), str(out), SMALL)
        assert not list(out.glob(".*"))
    assert sum(written.values()) == 2
    monkeypatch.setattr(offline, "write_whole", lambda place, data: (written.update([place]), real(place, data))[1])
    found = predict_source(torch_bundle, open_source(str(digits)), str(out), SMALL)
    assert set(written.values()) == {1} and len(written) == 4
    assert rows_of(out) == rows_of(tmp_path / "whole") and len(check_keys(out, digits)) == 250
    assert (found.exits == whole.exits).all() and found.unreadable == whole.unreadable
    assert found.new_images < found.images == 250
    in_process.clear()
    again = predict_source(torch_bundle, open_source(str(digits)), str(out), SMALL)
    assert not in_process and again.images == 250 and again.new_images == 0


def test_a_part_that_a_dead_worker_had_written_is_not_written_again(
    torch_bundle: Path, digits: Path, tmp_path: Path, in_process: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray calls again for the task of a worker that died; if the part is there, only what it holds is said."""
    predict_source(torch_bundle, open_source(str(digits)), str(tmp_path / "out"), SMALL)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(offline, "finished_parts", lambda out, plan: {})
    found = predict_source(torch_bundle, open_source(str(digits)), str(tmp_path / "out"), SMALL)
    assert found.images == 250 and len(in_process) == 8
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_another_bundle_source_or_setting_is_refused(
    torch_bundle: Path, onnx_bundle: Path, digits: Path, tmp_path: Path, in_process: list[int]
) -> None:
    out, source = str(tmp_path / "out"), open_source(str(digits))
    predict_source(torch_bundle, source, out, SMALL)
    shutil.copytree(digits, tmp_path / "more")
    (tmp_path / "more" / "one-more.png").write_bytes(b"")
    q = load_bundle(torch_bundle, device="cpu").policies.policies[0].q
    settings = {"part_images": 64, "batch": 16, "device": "cpu"}
    for bundle, where, changed, said in (
        (onnx_bundle, digits, {}, "another bundle"),
        (torch_bundle, tmp_path / "more", {}, "another source"),
        (torch_bundle, digits, {"part_images": 65}, "another --part-images: 64, this one has 65"),
        (torch_bundle, digits, {"max_exit": 1}, "another last exit: 3, this one has 1"),
        (torch_bundle, digits, {"q": q}, "another policy"),
        (torch_bundle, digits, {"max_pixels": 9}, "another --max-pixels"),
    ):
        with pytest.raises(ValueError, match=said):
            predict_source(bundle, open_source(str(where)), out, Asked(**{**settings, **changed}))
    # what does not change an answer may differ
    predict_source(torch_bundle, source, out, Asked(part_images=64, batch=7, device="cpu", max_unreadable=0.5))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds files but no _predict.json"):
        predict_source(torch_bundle, source, str(tmp_path / "full"), SMALL)


def test_files_that_are_no_parts_of_it_are_refused(
    torch_bundle: Path, digits: Path, tmp_path: Path, in_process: list[int]
) -> None:
    source, out = open_source(str(digits)), tmp_path / "out"
    predict_source(torch_bundle, source, str(out), SMALL)
    part = out / "part-000001.parquet"
    good = part.read_bytes()
    for name, data, said in (
        (part, good[:-9], "part-000001.parquet is damaged; remove it and start again"),
        (part, (out / "part-000002.parquet").read_bytes(), "part-000001.parquet is no part of this prediction"),
        (out / "part-000009.parquet", good, "part-000009.parquet is no part of this prediction"),
    ):
        name.write_bytes(data)
        with pytest.raises(ValueError, match=said):
            predict_source(torch_bundle, source, str(out), SMALL)
        part.write_bytes(good)
    (out / "part-000009.parquet").unlink()
    for left in (".part-000003.parquet.1.part", "..part-000003.parquet.host.1.part", ".part-000003.parquet.host.1"):
        (out / left).write_bytes(b"left by a worker that was killed")
    part.unlink()
    in_process.clear()
    predict_source(torch_bundle, source, str(out), SMALL)
    assert in_process == [1] and len(check_keys(out, digits)) == 250 and not list(out.glob(".*"))


def test_too_many_unreadable_images_stop_it_and_can_be_tried_again(
    torch_bundle: Path, digits: Path, tmp_path: Path, in_process: list[int]
) -> None:
    source, out = tmp_path / "digits", tmp_path / "out"
    shutil.copytree(digits, source)
    good = (source / "000" / "00000.png").read_bytes()
    for at in range(200, 210):
        (source / "002" / f"{at:05d}.png").write_bytes(b"damaged")
    listed = open_source(str(source))
    for _ in range(2):  # and again: what was found is not forgotten
        with pytest.raises(ValueError, match=r"more than 1 % of 250; .* larger --max-unreadable"):
            predict_source(torch_bundle, listed, str(out), SMALL)
    assert list(out.glob("part-*"))
    with pytest.raises(ValueError, match="more than 0 %"):
        predict_source(torch_bundle, listed, str(out), Asked(part_images=64, device="cpu", max_unreadable=0))
    with pytest.raises(ValueError, match="a share from 0 to 1"):
        Asked(max_unreadable=2)
    found = predict_source(torch_bundle, listed, str(out), Asked(part_images=64, device="cpu", max_unreadable=0.1))
    assert found.unreadable == 12
    bad = [row for row in check_keys(out, source) if row["error"]]
    assert len(bad) == 12 and all(row["label"] is row["exit"] is None for row in bad)
    assert {row["error"] for row in bad} == {"it is no image of a known kind"}
    for at in range(200, 210):
        (source / "002" / f"{at:05d}.png").write_bytes(good)
    in_process.clear()
    again = Asked(part_images=64, device="cpu", retry_unreadable=True)
    found = predict_source(torch_bundle, listed, str(out), again)
    assert found.unreadable == 2 and 0 < len(in_process) < 4 and len(check_keys(out, source)) == 250


def test_parts_that_are_done_again_stay_until_they_are_replaced(
    torch_bundle: Path, digits: Path, tmp_path: Path, in_process: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray may not start, or the command be killed: nothing is lost by asking for them again."""
    out, source = tmp_path / "out", open_source(str(digits))
    predict_source(torch_bundle, source, str(out), SMALL)
    before = rows_of(out)
    again = Asked(part_images=64, batch=16, device="cpu", retry_unreadable=True)

    def fails(address: str, shape: Any) -> Any:
        raise RayFailed("Ray cannot be started")

    with monkeypatch.context() as patch, pytest.raises(RayFailed):
        patch.setattr(offline, "ray_cluster", fails)
        predict_source(torch_bundle, source, str(out), again)
    assert rows_of(out) == before
    in_process.clear()
    found = predict_source(torch_bundle, source, str(out), again)
    assert sorted(in_process) == [1, 3] and (found.images, found.unreadable, found.parts) == (250, 2, 4)
    assert found.new_images == 64 + 58 and rows_of(out) == before


def test_a_folder_that_machines_do_not_share_is_a_sentence(
    torch_bundle: Path, digits: Path, tmp_path: Path, in_process: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that does not see the folder says so before it works; one that has another of this name, at the end."""
    out, source, real = tmp_path / "out", open_source(str(digits)), offline.write_whole
    with monkeypatch.context() as patch:
        patch.setattr(offline, "kind_of", lambda place: "nothing")
        with pytest.raises(OSError, match=f"does not see {out}; every machine must, under this name"):
            predict_source(torch_bundle, source, str(out), SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(offline, "write_whole", lambda place, data: "part-000002" in place or real(place, data))
        with pytest.raises(OSError, match=f"1 of 4 parts were written, but not into the {out} of this machine"):
            predict_source(torch_bundle, source, str(out), SMALL)
    in_process.clear()
    predict_source(torch_bundle, source, str(out), SMALL)
    assert in_process == [2] and len(check_keys(out, digits)) == 250


def test_one_command_at_a_time_writes_into_a_folder(
    torch_bundle: Path, digits: Path, tmp_path: Path, in_process: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, source, real = tmp_path / "out", open_source(str(digits)), offline.write_whole
    refused: list[str] = []

    def second(place: str, data: bytes) -> None:
        with pytest.raises(ValueError, match="choose another --out") as error:
            predict_source(torch_bundle, source, str(out), SMALL)
        refused.append(str(error.value))
        real(place, data)

    monkeypatch.setattr(offline, "write_whole", second)
    predict_source(torch_bundle, source, str(out), SMALL)
    assert set(refused) == {f"{out} is being written by process {os.getpid()}; wait for it or choose another --out"}
    assert len(refused) == 4 and len(check_keys(out, digits)) == 250 and not list(out.glob(".*"))


def test_processes_of_two_machines_never_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In containers every worker may have the same number."""
    seen: list[str] = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (seen.append(Path(old).name), real(old, new)))
    for host in ("one", "two"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        write_whole(str(tmp_path / "part.parquet"), b"data")
    assert len(set(seen)) == 4 and [host in name for name, host in zip(seen, ["one"] * 2 + ["two"] * 2, strict=True)]


@pytest.mark.parametrize("trouble", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, None])
def test_what_is_wrong_with_the_machine_is_no_unreadable_image(
    trouble: int | None,
    torch_bundle: Path,
    digits: Path,
    tmp_path: Path,
    in_process: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stops the command, and the same command does that part later."""
    bad, real = digits / "001" / "00123.png", PngImagePlugin.PngImageFile.load

    def failing(image: Any) -> Any:
        if str(getattr(image, "filename", "")) == str(bad):
            raise MemoryError if trouble is None else OSError(trouble, os.strerror(trouble))
        return real(image)

    kind: type[BaseException] = MemoryError if trouble is None else OSError
    with monkeypatch.context() as patch, pytest.raises(kind) as error:
        patch.setattr(PngImagePlugin.PngImageFile, "load", failing)
        predict_source(torch_bundle, open_source(str(digits)), str(tmp_path / "out"), SMALL)
    assert trouble is None or error.value.filename == str(bad)
    found = predict_source(torch_bundle, open_source(str(digits)), str(tmp_path / "out"), SMALL)
    assert found.unreadable == 2 and len(check_keys(tmp_path / "out", digits)) == 250


def test_row_groups_far_larger_than_a_part_are_worth_a_word(
    torch_bundle: Path, digits: Path, tmp_path: Path, in_process: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    cells = [path.read_bytes() for path in sorted((digits / "000").iterdir())]
    for rows, said in ((20, 0), (100, 1)):
        place = str(tmp_path / f"{rows}.parquet")
        pq.write_table(pa.table({"image": cells}), place, row_group_size=rows)
        asked = Asked(part_images=10, device="cpu", max_unreadable=1.0)
        predict_source(torch_bundle, open_source(place), str(tmp_path / f"out-{rows}"), asked)
        assert caplog.text.count("each part reads its group from the first row on") == said


def test_from_a_store_into_a_store(
    onnx_bundle: Path, digits: Path, tmp_path: Path, s3: str, in_process: list[int]
) -> None:
    for path in sorted((digits / "000").iterdir()):
        write_whole(f"{s3}/in/{path.name}", path.read_bytes())
    asked = Asked(part_images=32, device="cpu", max_unreadable=0.5)
    predict_source(onnx_bundle, open_source(f"{s3}/in"), f"{s3}/out/", asked)
    predict_source(onnx_bundle, open_source(str(digits / "000")), str(tmp_path / "out"), asked)
    names = names_below(f"{s3}/out")
    assert names == ["_predict.json", *(f"part-{at:06d}.parquet" for at in range(4))]
    (tmp_path / "copy").mkdir()
    for name in names:
        (tmp_path / "copy" / name).write_bytes(read_all(f"{s3}/out/{name}"))
    assert rows_of(tmp_path / "copy") == rows_of(tmp_path / "out") and len(rows_of(tmp_path / "out")) == 101
    in_process.clear()
    assert predict_source(onnx_bundle, open_source(f"{s3}/in"), f"{s3}/out", asked).images == 101
    assert not in_process
    with pytest.raises(ValueError, match="another last exit"):
        changed = Asked(part_images=32, device="cpu", max_unreadable=0.5, max_exit=1)
        predict_source(onnx_bundle, open_source(f"{s3}/in"), f"{s3}/out", changed)


def test_a_worker_without_the_folder_gets_the_bundles_files(onnx_bundle: Path, tmp_path: Path) -> None:
    packed = PackedBundle.of(onnx_bundle, "cpu", 1)
    moved = PackedBundle(str(tmp_path / "elsewhere"), packed.digest, packed.files, "cpu", 1)
    assert moved.load().digest == load_bundle(onnx_bundle, device="cpu").digest
    damaged = {**packed.files, "policy.json": b"{}"}
    with pytest.raises(ValueError, match="policy.json is not the file that was written"):
        PackedBundle(str(tmp_path / "elsewhere"), packed.digest, damaged, "cpu", 1).load()


def test_parts_are_large_where_there_are_many_images() -> None:
    assert [part_images_for(size) for size in (1, 65_535, 65_536, 10**9)] == [1024, 1024, 4096, 4096]
    assert part_images_for(100, 7) == 7
    assert Totals((1, 2), 5).to_json()["images"] == 0


def test_the_command_line(
    torch_bundle: Path,
    digits: Path,
    tmp_path: Path,
    in_process: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    words = ("predict", torch_bundle, digits, "--ray", "--out", out)
    assert call(monkeypatch, *words) == 1  # two images cannot be read
    shown = capsys.readouterr().out
    assert f"{digits}: 250 images in 1 parts of 1,024" in shown and "2 of them could not be read" in shown
    assert call(monkeypatch, *words, "--json") == 1
    assert json.loads(capsys.readouterr().out)["new_images"] == 0
    good = ("predict", torch_bundle, digits / "000", "--ray", "--max-unreadable", "0", "--out", tmp_path / "good")
    (digits / "000" / "broken.png").rename(tmp_path / "broken.png")
    try:
        assert call(monkeypatch, *good) == 0
    finally:
        (tmp_path / "broken.png").rename(digits / "000" / "broken.png")
    capsys.readouterr()
    for more, said in (
        (["--part-images", "64"], "--part-images must be 1,024 or more, got 64"),
        ([digits], "with --ray give one source"),
        (["--max-exit", "1"], "another last exit"),
        (["--workers", "0"], "--workers must be 1 or more"),
    ):
        assert call(monkeypatch, *words, *more) == 2
        assert said in capsys.readouterr().err
    assert call(monkeypatch, "predict", torch_bundle, digits, "--ray") == 2
    assert "and --out FOLDER" in capsys.readouterr().err
    assert call(monkeypatch, "predict", torch_bundle, digits, "--workers", "2") == 2
    assert "need --ray" in capsys.readouterr().err
