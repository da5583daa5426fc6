"""Claiming a run: the same name resumes, another configuration is refused by field."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from elastic.storage.claim import IdentityMismatch, RunSpec, claim
from elastic.storage.filesystem import Filesystem
from elastic.storage.run_file import load_run_file

SPEC = RunSpec(
    name="a",
    seed=1,
    identity={"model": {"dim": 32, "num_layers": 2}, "global_batch": 12},
    operational={"steps": 100},
    versions={"torch": "2.13.0"},
)


def test_the_same_name_resumes_and_operational_changes_are_told(tmp_path: Path):  # B23
    fs = Filesystem.at(str(tmp_path))
    first = claim(fs, SPEC, "first")
    assert first.is_new and first.changed == []
    first.lease.release()
    again = claim(fs, dataclasses.replace(SPEC, operational={"steps": 200}), "second")
    again.lease.release()
    assert not again.is_new and again.run_file.run_id == first.run_file.run_id
    assert [str(change) for change in again.changed] == ["steps: was 100, now 200"]
    assert load_run_file(fs).operational == {"steps": 200}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"identity": {"model": {"dim": 64, "num_layers": 2}, "global_batch": 12}}, "model.dim"),
        ({"seed": 2}, "seed: was 1, now 2"),
        ({"identity": {"model": {"dim": 32, "num_layers": 2}}}, "global_batch: was 12"),
    ],
)
def test_another_configuration_is_refused_by_field_and_changes_nothing(
    tmp_path: Path, change: dict, said: str
):  # B23
    fs = Filesystem.at(str(tmp_path))
    claim(fs, SPEC, "first").lease.release()
    before = load_run_file(fs)
    with pytest.raises(IdentityMismatch, match=said):
        claim(fs, dataclasses.replace(SPEC, **change), "second")
    assert load_run_file(fs) == before
    claim(fs, SPEC, "third").lease.release()  # the refused one has let go of the lease


def test_a_change_is_accepted_by_its_field_and_stays(tmp_path: Path):
    fs = Filesystem.at(str(tmp_path))
    claim(fs, SPEC, "first").lease.release()
    wider = {"model": {"dim": 64, "num_layers": 2}, "global_batch": 12}
    changed = dataclasses.replace(SPEC, identity=wider, accepted=["model"])
    accepted = claim(fs, changed, "second")
    accepted.lease.release()
    assert [change.field for change in accepted.changed] == ["model.dim"]
    claim(fs, dataclasses.replace(SPEC, identity=wider), "third").lease.release()


def test_a_lost_run_file_is_not_replaced_by_a_new_run(tmp_path: Path):  # B17
    fs = Filesystem.at(str(tmp_path))
    fs.write_bytes("checkpoints/step-10/_COMPLETE", b"{}")
    with pytest.raises(ValueError, match=r"no run\.json"):
        claim(fs, SPEC, "first")
    with pytest.raises(ValueError, match="bring it back"):
        claim(fs, SPEC, "second")  # the first, refused, has let go of the lease
