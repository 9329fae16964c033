"""The manifest of a finished run: a digest of every file that training wrote, so that damage is seen and named.

It is written last. What comes later (`eval/`, `policy.json`) and the states to go on from, which have digests of their
own, are not in it. While a run is under way, its states carry the digests of the files that it will not write again.
Runs of older versions have neither, and nothing is said of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from offramp.common.files import check_digests, difference, read_sealed_json, sha256, write_sealed_json
from offramp.runs.folder import BEGINNING, CONFIG, METRICS, SAMPLES, TENSORBOARD, WEIGHTS, sample_name

log = logging.getLogger("offramp")

MANIFEST = "manifest.json"
NEEDED = (CONFIG, WEIGHTS)  # a network is made of these
Digests = dict[str, str]  # by name, as seen from the run folder


def write_manifest(run: Path, known: Digests) -> None:
    """Write down the digests of a finished run; `known` are those from before, which a damaged file still has."""
    files = _digests(run, CONFIG, *BEGINNING, METRICS, WEIGHTS, f"{SAMPLES}/*", f"{TENSORBOARD}/*")
    write_sealed_json(run / MANIFEST, {"schema": 1, "files": files | known})


def lasting_files(run: Path, epochs: Iterable[int], known: Digests) -> Digests:
    """The digests of what a run has written once and for all after these epochs, beside those `known` from before."""
    return _digests(run, CONFIG, *BEGINNING, *map(sample_name, epochs)) | known


def look_over(run: Path, known: Digests, finished: bool) -> Digests:
    """Name what is damaged in a run that goes on from a state, and give the digests of what it will not write again.

    `known` are the state's. The manifest goes if there is something left to train: there will be another.
    """
    told = _told(run)
    _name_damage(run, told | known)
    if not finished:
        (run / MANIFEST).unlink(missing_ok=True)
    events = f"{TENSORBOARD}/"
    return _digests(run, f"{events}*") | {name: told[name] for name in told if name.startswith(events)} | known


def name_damage(run: Path) -> None:
    """One warning for each file of a finished run that is missing or is not the one that training wrote."""
    _name_damage(run, _told(run))


def refuse_damaged_network(folder: Path) -> None:
    """Raise if the files that a network is made of are not those that training wrote."""
    known = read_manifest(folder)
    check_digests(folder, {name: known[name] for name in NEEDED if name in known})


def read_manifest(run: Path) -> Digests:
    """File name -> digest; empty for a run without a manifest."""
    if not (run / MANIFEST).is_file():
        return {}
    found = read_sealed_json(run / MANIFEST)
    files = found.get("files") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
        raise ValueError(f"{run / MANIFEST} is damaged: it must give the digests of the run's files")
    return files


def _told(run: Path) -> Digests:
    """What the manifest says; a damaged one is named and says nothing."""
    try:
        return read_manifest(run)
    except ValueError as error:
        log.warning("%s", error)
        return {}


def _name_damage(run: Path, digests: Digests) -> None:
    for name, digest in digests.items():
        wrong = difference(run / name, digest)
        if wrong:
            log.warning("%s %s", run / name, wrong)


def _digests(run: Path, *patterns: str) -> Digests:
    found = (path for pattern in patterns for path in sorted(run.glob(pattern)))
    return {path.relative_to(run).as_posix(): sha256(path) for path in found if not path.name.startswith(".")}
