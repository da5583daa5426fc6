"""The run as a whole, on gloo ranks: continuity at any size, and checkpoints that are damaged."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import read_ledger
from tests.dist.processes import RankFailed
from tests.dist.standalone_run import Recipe, catalog, curve, files_of, run


def worst(left: list[float], right: list[float]) -> float:
    assert len(left) == len(right)
    return max(abs(a - b) / max(abs(a), abs(b)) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float64", 1e-9), pytest.param("float32", 1e-5, marks=pytest.mark.thorough)],
)
def test_three_to_two_to_three(tmp_path: Path, optimizer: str, dtype: str, tolerance: float):
    whole = Recipe(root=f"{tmp_path}/whole", until=60, optimizer=optimizer, dtype=dtype)
    parts = dataclasses.replace(whole, root=f"{tmp_path}/parts")
    reference = run(3, whole)
    ended = [
        run(size, dataclasses.replace(parts, until=until))
        for size, until in ((3, 20), (2, 41), (3, 60))
    ]
    for name in ("loss", "grad_norm"):
        assert worst(curve(whole.root, name), curve(parts.root, name)) <= tolerance
    assert curve(whole.root, "lr") == curve(parts.root, "lr")
    for key in ("step", "samples", "epoch"):
        assert {rank[key] for rank in ended[-1]} == {reference[0][key]}
    by_step = {
        step: sorted(index for rank in part for index in rank["steps"].get(step, []))
        for part in ended
        for step in part[0]["steps"]
    }
    for step, indices in by_step.items():  # the same samples in every step, at any size
        expected = {index for rank in reference for index in rank["steps"][step]}
        assert set(indices) == expected


def test_resume_at_the_same_size_changes_no_bit(tmp_path: Path):  # B27, B31, B36, B49
    whole = Recipe(root=f"{tmp_path}/whole", until=40, noise=0.5)
    parts = dataclasses.replace(whole, root=f"{tmp_path}/parts")
    reference = run(2, whole)
    for until in (10, 15, 17, 40):
        ended = run(2, dataclasses.replace(parts, until=until))
    assert curve(whole.root) == curve(parts.root)
    assert curve(whole.root, "grad_norm") == curve(parts.root, "grad_norm")
    assert [rank["counter"] for rank in ended] == [rank["counter"] for rank in reference]
    assert ended[0]["counter"] == {"calls": 40}
    for step in range(18, 41):
        assert ended[1]["steps"][step] == reference[1]["steps"][step]


def test_the_end_is_saved_off_the_interval_with_a_slow_writer(tmp_path: Path):  # B06
    recipe = Recipe(root=f"{tmp_path}/run", until=23, behind="skip", slow_write_s=0.5)
    run(1, recipe)
    steps = catalog(recipe.root).complete_steps()
    assert steps[0] == 0 and steps[-1] == 23


@pytest.mark.parametrize("kind", ["half", "empty", "flipped", "gone"])
def test_bad_newest_checkpoint_is_passed_by_once(tmp_path: Path, kind: str):  # B14, B10
    recipe = Recipe(root=f"{tmp_path}/run", until=20)
    run(2, recipe)
    expected = curve(recipe.root)
    damage(files_of(recipe.root, 20)[0], kind)
    ended = run(2, recipe)
    assert {rank["resumed"] for rank in ended} == {10}
    assert curve(recipe.root) == expected
    assert catalog(recipe.root).highest().step == 20
    events = read_ledger(Filesystem.at(recipe.root))
    quarantined = [e for e in events if "quarantined" in e.kind]
    passed_by = [e for e in events if e.kind == "checkpoint_passed_by"]
    told = [(e.life, e.step, e.data["resumed_step"]) for e in passed_by]
    assert told == ([] if kind == "flipped" else [(1, 20, 10)])
    assert all(e.data["problem"] in e.reason for e in passed_by)
    if kind == "flipped":  # the others are not complete, which needs no reading of bytes
        assert len(quarantined) == 1 and quarantined[0].step == 20
        assert "expected xxh3_128:" in quarantined[0].reason
        aside = Path(recipe.root, "checkpoints/quarantine")
        assert "xxh3_128" in next(aside.glob("step-20-*/REASON")).read_text()


SPOILT = "the loss of step 22 is nan, 2 steps after the checkpoint of step 20 was loaded"


def told(root: str) -> list[tuple[str, int]]:
    kinds = ("resumed", "checkpoint_suspect", "checkpoint_trusted")
    return [(e.kind, e.step) for e in read_ledger(Filesystem.at(root)) if e.kind in kinds]


def test_a_loss_that_is_not_finite_after_a_load_makes_the_checkpoint_suspect(tmp_path: Path):
    recipe = Recipe(root=f"{tmp_path}/run", until=20)
    run(2, recipe)
    # Spoilt is what is trained from step 20 as it was saved first, in the second step of it.
    spoilt = dataclasses.replace(recipe, until=30, extra={"spoilt": {20: [22]}})
    with pytest.raises(RankFailed, match=f"CheckpointSuspect: {SPOILT}"):
        run(2, spoilt)
    assert [rank["resumed"] for rank in run(3, spoilt)] == [10] * 3
    assert all(map(math.isfinite, curve(recipe.root)))
    assert told(recipe.root) == [("resumed", 20), ("checkpoint_suspect", 20), ("resumed", 10)]
    (why,) = Path(recipe.root, "checkpoints/quarantine").glob("step-20-*/REASON")
    assert "replaced" in why.read_text() and f"it was suspect: {SPOILT}" in why.read_text()
    # It was saved anew meanwhile, and that one counts.
    assert [rank["resumed"] for rank in run(1, dataclasses.replace(recipe, until=31))] == [30]


def test_the_same_loss_from_the_checkpoint_before_ends_the_run(tmp_path: Path):
    recipe = Recipe(root=f"{tmp_path}/run", until=20)
    run(2, recipe)
    spoilt = dataclasses.replace(recipe, until=30, extra={"spoilt": {20: [22], 10: [22]}})
    with pytest.raises(RankFailed, match="CheckpointSuspect"):
        run(2, spoilt)
    with pytest.raises(RankFailed, match=r"LossNotFinite: .* the bytes are not the cause"):
        run(2, spoilt)
    assert told(recipe.root)[1:] == [
        ("checkpoint_suspect", 20),
        ("resumed", 10),
        ("checkpoint_trusted", 20),
    ]
    assert catalog(recipe.root).complete_steps() == [0, 10, 20]
    mended = dataclasses.replace(recipe, until=22)
    assert [rank["resumed"] for rank in run(2, mended)] == [20, 20]


@pytest.mark.thorough
def test_a_loss_that_goes_wrong_later_suspects_nothing(tmp_path: Path):
    recipe = Recipe(root=f"{tmp_path}/run", until=20)
    run(2, recipe)
    spoilt = dataclasses.replace(recipe, until=26, extra={"spoilt": {20: [24]}})
    assert [rank["step"] for rank in run(2, spoilt)] == [26, 26]
    assert told(recipe.root) == [("resumed", 20)]


def damage(path: Path, kind: str) -> None:
    data = path.read_bytes()
    if kind == "gone":
        path.unlink()
        return
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
    path.write_bytes({"half": data[:middle], "empty": b"", "flipped": flipped}[kind])


def test_all_bad_is_an_error_and_no_silent_start_from_zero(tmp_path: Path):  # B14, B17
    recipe = Recipe(root=f"{tmp_path}/run", until=10)
    run(2, recipe)
    for step in (0, 10):
        damage(files_of(recipe.root, step)[0], "flipped")
    with pytest.raises(RankFailed, match="no checkpoint with sound bytes is left"):
        run(2, recipe)


@pytest.mark.parametrize("name", ["state.json", "rank-1.json"])
def test_a_checkpoint_without_one_of_its_parts_is_incomplete(tmp_path: Path, name: str):  # B15
    recipe = Recipe(root=f"{tmp_path}/run", until=20)
    run(2, recipe)
    next(path for path in files_of(recipe.root, 20) if path.name == name).unlink()
    assert {rank["resumed"] for rank in run(2, recipe)} == {10}


def test_pointer_files_mean_nothing(tmp_path: Path):  # B17, B22
    recipe = Recipe(root=f"{tmp_path}/run", until=20)
    run(2, recipe)
    for name in ("latest", "latest_checkpointed_iteration.txt"):
        Path(recipe.root, "checkpoints", name).write_text("10")
    stale = Path.cwd() / "checkpoints"
    assert not stale.exists()
    assert {rank["resumed"] for rank in run(2, recipe)} == {20}


def test_four_to_two_to_four_all_ranks_resume_at_one_step(tmp_path: Path):  # B18
    recipe = Recipe(root=f"{tmp_path}/run", until=10)
    run(4, recipe)
    run(2, dataclasses.replace(recipe, until=20))
    ended = run(4, dataclasses.replace(recipe, until=30))
    assert [rank["resumed"] for rank in ended] == [20] * 4


def test_files_that_one_rank_sees_late_are_waited_for(tmp_path: Path):  # B19
    recipe = Recipe(root=f"{tmp_path}/run", until=20)
    run(2, recipe)
    late = dataclasses.replace(recipe, until=25, hide_from_rank_1_s=5.0, extra={"newest": 20})
    assert {rank["resumed"] for rank in run(2, late)} == {20}


def test_leftovers_of_a_step_are_replaced(tmp_path: Path):  # B20
    recipe = Recipe(root=f"{tmp_path}/run", until=10)
    run(2, recipe)
    for name in ("step-20", "step-20.tmp-0-3"):
        partial = Path(recipe.root, "checkpoints", name)
        partial.mkdir()
        (partial / "__0_0.distcp").write_bytes(b"half")
    run(2, dataclasses.replace(recipe, until=25))
    assert catalog(recipe.root).complete_steps() == [0, 10, 20, 25]


def test_a_rank_that_dies_between_saves_loses_steps_and_nothing_else(tmp_path: Path):
    whole = Recipe(root=f"{tmp_path}/whole", until=30, noise=0.1)
    parts = dataclasses.replace(whole, root=f"{tmp_path}/parts", die_at=17)
    run(2, whole)
    run(2, parts, may_die=(0, 1))
    assert {rank["resumed"] for rank in run(2, dataclasses.replace(parts, die_at=None))} == {10}
    assert curve(whole.root) == curve(parts.root)


def test_twelve_samples_on_five_ranks(tmp_path: Path):
    one = Recipe(root=f"{tmp_path}/one", until=15)
    five = dataclasses.replace(one, root=f"{tmp_path}/five")
    run(1, one)
    run(5, five)
    assert worst(curve(one.root), curve(five.root)) <= 1e-9
