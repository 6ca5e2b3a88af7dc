"""Records of rollouts, groups and steps for tests of their readers."""

from typing import Any

from everburn.learning.group import GroupManifest, Member
from everburn.learning.rollout_file import CompletionRecord
from everburn.records.ids import GroupKey, StoredRef
from everburn.records.ledger import LedgerEntry
from support.sessions import ADAM


def a_record(**changes: Any) -> CompletionRecord:
    """An arbitrary completion with some changes."""
    values = {
        "run": "r",
        "cursor": 0,
        "row_index": 0,
        "epoch": 0,
        "attempt": 0,
        "incarnation": 0,
        "completion": 0,
        "version": 0,
        "versions": [0],
        "at_token_limit": False,
        "output_tokens": 2,
        "prompt": "",
        "answer": "",
        "info": {},
        "seconds": 1.0,
    }
    return CompletionRecord.model_validate(values | changes)


def a_member(stored: StoredRef, **changes: Any) -> Member:
    """A surviving completion of two tokens with an advantage."""
    values = {
        "completion": 0,
        "stored": stored,
        "reward": 1.0,
        "advantage": 1.0,
        "segments": 1,
        "tokens": 2,
        "trained_tokens": 1,
        "row_index": 0,
        "epoch": 0,
    }
    return Member.model_validate(values | changes)


def a_group(key: GroupKey, members: list[Member], **changes: Any) -> GroupManifest:
    """An accepted group."""
    values = {
        "key": key,
        "version": 0,
        "outcome": "accepted",
        "rejected": False,
        "completions": len(members),
        "members": members,
        "lost": [],
    }
    return GroupManifest.model_validate(values | changes)


def an_entry(step: int, groups: tuple[str, ...] = ("0", "1")) -> LedgerEntry:
    """A step committed under the first lease."""
    return LedgerEntry(
        step=step,
        version=step,
        incarnation=0,
        lease_epoch=1,
        updated=True,
        attempts=1,
        groups=[GroupKey.parse(name) for name in groups],
        digests=["0" * 64 for _ in groups],
        submissions=[],
        loss="grpo",
        loss_config={},
        adam=ADAM,
        snapshot=f"policy-{step}",
        seconds=1.5,
        metrics={"rollout/raw_reward": 0.5},
    )
