"""Damaged run directories: every verb that reads answers in words, and leaves all as it lies."""

from __future__ import annotations

import shutil
import traceback
from pathlib import Path

import pytest
from click.testing import CliRunner

from elastic.cli import main
from elastic.storage import pins
from tests.damage import damage
from tests.made_run import BORN_S, add_checkpoint, add_history, fingerprint, make_run

VERBS = [
    ["status"],
    ["status", "--json"],
    ["events", "--all"],
    ["events", "--json"],
    ["checkpoints", "list"],
    ["checkpoints", "verify"],
    ["checkpoints", "verify", "--json", "--step", "8"],
    ["checkpoints", "prune", "--keep", "1"],
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two lives, three checkpoints, one of them pinned, one in quarantine, one save on its way."""
    root = tmp_path_factory.mktemp("sound") / "demo"
    catalog = make_run(root)
    for life in (0, 1):
        add_history(catalog, life)
    for step in (0, 2, 4, 8):
        add_checkpoint(catalog, step)
    pins.pin(catalog, 4, time_s=BORN_S)
    catalog.quarantine(2, "bad bytes")
    catalog.fs.write_bytes(f"{catalog.begin(12, 1, 0)}/__0_0.distcp", b"half")
    return root


def answers(verb: list[str], root: Path) -> tuple[int, str]:
    """Exit code and all that was said; a traceback fails."""
    result = CliRunner().invoke(main, [*verb, str(root)])
    if not isinstance(result.exception, SystemExit | None):
        shown = "".join(traceback.format_exception(result.exception))
        raise AssertionError(f"elastic {' '.join(verb)} raised\n{shown}")
    assert "Traceback" not in result.output
    return result.exit_code, result.output


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_sound_run_is_answered_for(verb: list[str], sound: Path) -> None:
    before = fingerprint(sound)
    code, said = answers(verb, sound)
    assert (code, fingerprint(sound)) == (0, before)
    assert said


@pytest.mark.parametrize("seed", range(100))
def test_a_damaged_run_is_answered_for_and_left_alone(
    seed: int, sound: Path, tmp_path: Path
) -> None:
    root = tmp_path / "demo"
    shutil.copytree(sound, root)
    done = damage(root, seed)
    print(f"seed {seed}: {'; '.join(done)}")
    before = fingerprint(root)
    for verb in VERBS:
        code, said = answers(verb, root)
        print(f"  {' '.join(verb)}: {code} {said.splitlines()[-1:]}")
        assert code in (0, 1, 2), verb
        assert said.strip(), verb
        if code == 2:
            assert said.startswith("Error: "), said
            assert len(said.strip().splitlines()) == 1, said
        assert fingerprint(root) == before, f"{verb} changed the run"
