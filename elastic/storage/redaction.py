"""Redaction: what looks like a secret is not written down, whoever put it there.

Fields are judged by their names: one with the word token, secret, password, key or alike in it
loses its text. Numbers stay, since they count things. Pure; must not import ray or torch.
"""

from __future__ import annotations

import re
from typing import Any

REDACTED = "(redacted)"

_SECRET = re.compile(
    "token|secrets?|password|passwd|passphrase|(api)?key|credentials?|authorization|bearer|cookie"
)
# What a tokenizer's configuration holds under the name of a token.
_VOCABULARY = re.compile("bos|eos|pad|unk|mask|sep|cls|special")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
# As in https://user:password@host; an account name alone, as in container@account, is no secret.
_URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+(?=@)")


def redacted(tree: Any) -> Any:
    """`tree`, made of JSON values, with the text of secret-like fields and URL passwords left out.

    A list or mapping below such a field loses all of its texts.
    """
    return _redacted(tree, hide=False)


def redacted_text(text: str) -> str:
    """`text` without the passwords of URLs in it."""
    return _URL_PASSWORD.sub(rf"\1:{REDACTED}", text)


def is_secret(field: str) -> bool:
    """Whether a field of this name is taken for one that holds a secret: `hf_token`, `apiKey`."""
    words = [word.lower() for word in _WORD.findall(field)]
    pairs = zip(["", *words], words, strict=False)
    return any(
        _SECRET.fullmatch(word) and not _VOCABULARY.fullmatch(before) for before, word in pairs
    )


def _redacted(tree: Any, *, hide: bool) -> Any:
    if isinstance(tree, dict):
        return {
            field: _redacted(value, hide=hide or is_secret(str(field)))
            for field, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [_redacted(value, hide=hide) for value in tree]
    if not isinstance(tree, str):
        return tree
    return REDACTED if hide and tree else redacted_text(tree)
