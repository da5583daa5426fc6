"""Secrets are not written down: judged by the names of fields, and by what URLs hold."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from elastic.storage.claim import IdentityMismatch, RunSpec, claim
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerWriter, read_ledger
from elastic.storage.redaction import REDACTED, is_secret, redacted, redacted_text


@pytest.mark.parametrize(
    "field",
    [
        *("token", "hf_token", "HF_TOKEN", "apiKey", "api_key", "WANDB_API_KEY", "key"),
        *("secretAccessKey", "password", "db-password", "aws.secret", "credentials"),
        "Authorization",
    ],
)
def test_secret_like_names(field: str) -> None:
    assert is_secret(field)


@pytest.mark.parametrize(
    "field",
    [
        *("tokens_per_s", "num_tokens", "tokenizer", "pad_token", "eosToken", "monkey", "keep"),
        *("keep_every", "lr", "turnkey", "secretary", "data_identity", ""),
    ],
)
def test_names_that_training_needs(field: str) -> None:
    assert not is_secret(field)


def test_texts_of_secret_fields_go_and_everything_else_stays() -> None:
    tree = {
        "lr": 0.1,
        "key": 7,
        "token": "",
        "wandb": {"api_key": "s3cr3t", "project": "x"},
        "secrets": {"a": "s3cr3t", "b": ["s3cr3t", 3, None, True]},
        "data": "https://ann:s3cr3t@host/path",
    }
    found = redacted(tree)
    assert "s3cr3t" not in json.dumps(found)
    assert found["lr"] == 0.1 and found["key"] == 7 and found["token"] == ""
    assert found["wandb"] == {"api_key": REDACTED, "project": "x"}
    assert found["secrets"]["b"] == [REDACTED, 3, None, True]
    assert tree["wandb"]["api_key"] == "s3cr3t", "the caller's own is as it was"


def test_passwords_in_urls_go_wherever_they_stand() -> None:
    said = redacted_text("cannot read s3://ann:pw@bucket/x and abfs://box@account/y at 10:30")
    assert said == f"cannot read s3://ann:{REDACTED}@bucket/x and abfs://box@account/y at 10:30"


def test_neither_run_file_nor_ledger_holds_a_secret(tmp_path: Path) -> None:
    fs = Filesystem.at(str(tmp_path))
    config = {"hf_token": "s3cr3t", "width": 8}
    spec = RunSpec(name="a", seed=1, config=config, identity=config, operational=config)
    claim(fs, spec, "first").lease.release()
    with closing(LedgerWriter(fs, 0, "a")) as ledger:
        data = {"traceback": "GET https://u:s3cr3t@host", "env": {"API_KEY": "s3cr3t"}}
        ledger.append("failed", time_s=1.0, reason="https://u:s3cr3t@host", data=data)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"s3cr3t" not in path.read_bytes(), path
    (event,) = read_ledger(fs)
    assert event.data["env"] == {"API_KEY": REDACTED}


def test_a_changed_secret_is_the_same_run_and_is_not_told(tmp_path: Path) -> None:
    fs = Filesystem.at(str(tmp_path))
    first = RunSpec(name="a", seed=1, identity={"hf_token": "old-one", "width": 8})
    claim(fs, first, "first").lease.release()
    again = claim(fs, RunSpec(name="a", seed=1, identity={"hf_token": "new", "width": 8}), "2nd")
    again.lease.release()
    assert again.changed == []
    with pytest.raises(IdentityMismatch) as refused:
        claim(fs, RunSpec(name="a", seed=1, identity={"width": 9}), "third")
    assert "old-one" not in str(refused.value) and "width" in str(refused.value)
