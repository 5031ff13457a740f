"""How a difference between ranks is told: who differs in what, and what the rule is."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence

RULE = (
    "Every rank of a mesh makes every call, with the same shapes, types and options: none evaluates, logs or "
    "saves alone."
)


def difference(statements: Mapping[int, Mapping[str, str]]) -> str:
    """Who differs in what, the smallest party first: it is the likely culprit."""
    names = list(dict.fromkeys(name for statement in statements.values() for name in statement))
    # Calls of two kinds state different things: only what both state tells them apart.
    if len({statement.get("call") for statement in statements.values()}) > 1:
        names = [name for name in names if all(name in statement for statement in statements.values())]
    alike: dict[str, list[str]] = {}
    for name in names:
        parties: dict[str, list[int]] = {}
        for rank, statement in statements.items():
            parties.setdefault(statement.get(name, "absent"), []).append(rank)
        if len(parties) > 1:
            ordered = sorted(parties.items(), key=lambda party: (len(party[1]), party[1]))
            told = ", but ".join(f"{value} on {named(ranks)}" for value, ranks in ordered)
            alike.setdefault(told, []).append(name)
    parts = [
        f"{some[0]} is {told}" if len(some) == 1 else f"{', '.join(some[:-1])} and {some[-1]} are {told}"
        for told, some in alike.items()
    ]
    call = statements[min(statements)].get("call", "")
    found = "; ".join(parts) if parts else "they are at different calls"
    return f"{call}: the ranks disagree: {found}. {RULE}"


def absence(
    call: str,
    here: Mapping[str, str],
    usual: tuple[str, Mapping[str, str]] | None,
    present: Sequence[int],
    absent: Sequence[int],
    timeout: float,
) -> str:
    """Of ranks that did not come to a call that is compared.

    ``here`` is what this rank states; ``usual`` the action that was next in the pattern of calls and what it
    stated, None where nothing was foreseen.
    """
    if not absent:
        return (
            f"{call}: all ranks came to it, but not within {timeout:g} s: one was held up. Find out by what, "
            "or give init_attention_mesh a longer timeout."
        )
    text = (
        f"{call}: {named(absent)} did not come to it within {timeout:g} s, only {named(present)} did. Either "
        "they have died or stalled, or do not make this call, or "
    )
    if usual is None:
        told = ", ".join(f"{name} is {value}" for name, value in here.items())
        return f"{text}they go on with other arguments than here: {told}. {RULE}"
    action, before = usual
    left = f"{text}{named(present)} left the pattern of calls, in which {action} was next"
    if action != call.partition(",")[0]:
        caught = " (which an error that is caught may leave out)" if action == "backward" else ""
        return f"{left}{caught}. {RULE}"
    changes = [
        f"{name} is {value} here and was {before.get(name, 'absent')}"
        for name, value in here.items()
        if value != before.get(name)
    ]
    return f"{left}: {'; '.join(changes) or 'another call'}. {RULE}"


def digest(numbers: Sequence[int]) -> str:
    """A few characters that differ where the numbers do."""
    return hashlib.sha256(array("q", numbers).tobytes()).hexdigest()[:16]


def first_difference(name: str, lists: Mapping[int, Sequence[str]]) -> tuple[str, dict[int, str]]:
    """Where the lists of the ranks part, and what each rank has there; nothing where they do not."""
    for index in range(min(map(len, lists.values()))):
        if len({numbers[index] for numbers in lists.values()}) > 1:
            return f"{name}[{index}]", {rank: numbers[index] for rank, numbers in lists.items()}
    if len({len(numbers) for numbers in lists.values()}) > 1:
        return f"length of {name}", {rank: str(len(numbers)) for rank, numbers in lists.items()}
    return name, {}


def named(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
