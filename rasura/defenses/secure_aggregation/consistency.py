"""That all clients answer the same lists: a server that tells two lists of survivors gets shares for one of them at most.

The consistency check of Bonawitz et al. 2017 (fig. 4, round 3), where clients have identities. A client signs two texts:

- with its masked update, who took part when it masked it (``masked_text``);
- once, the list of survivors that it was told, with the former list (``survivors_text``).

Both begin with the digest of the round: its session and number, the model, all keys and who signed them. A client gives
out shares only where ``quorum`` of those on its own list signed exactly that list, and where each of its neighbours on it
masked its update for the same clients.

**Claim.** Let at most ``c`` of a round's ``n`` clients collude, with ``c`` as in ``graph.counts``. Of all honest clients
that give out shares for one digest, all do so for the same two lists.

Proof. The digest fixes ``n``, the keys, and whose identity each place in the list of keys has. Every client checks that
its own place is its own, and makes new keys for each round. So an honest identity signs for a digest only with the keys
that are in it, and with these it signs one list, since a stage is answered once. Let two honest clients accept the lists
A and B. At least ``q = (n + c) // 2 + 1`` places signed A, and at least ``q`` signed B. Both sets are among ``n`` places,
so at least ``2 q - n > c`` places signed both. One of these is honest, and signed one list: A = B.

It follows, for one digest:

- No client's self mask is opened by some honest clients and its key by others. Of the other kind the server has at most
  the shares that colluding clients hold. These are fewer than the threshold: in a complete graph always, in a sparse one
  except with the probability that ``graph`` states, for colluding clients who do not depend on the graph.
- Honest clients open the mask of an update only if it was masked for the clients on the common list. A server cannot hide
  a neighbour's shares from one client, so that it leaves out their common mask, and have this update opened.
- In a complete graph, the server learns at most the sum of all honest clients on the common list: none of their masks with
  each other is missing, and none of their keys is opened.

In a sparse graph the third point is not claimed. A server that breaks the protocol can choose who is gone after it knows
the graph, so that a part of the ring is cut off, and what is opened is the sum of that part.

**All of the round, and not the neighbours.** Bell et al. 2020 let each client hear its neighbours alone. Two clients with
few common neighbours then need no honest signer in common, and may accept two lists. A random committee would be smaller,
but a server that breaks the protocol may try lists of keys until one suits it. Here the claim holds with certainty, for
complete and for sparse graphs. The first text is about one update, so that only the neighbours, who hold its shares,
check it.

**The price.** Where ``n`` is a multiple of three and a third may collude, fewer than a third may be gone. No check avoids
it. Let a third collude, and let the other two thirds be groups of equal size, each told that the other is gone. If a
third may be gone, each group must go on with the colluding clients alone, each with its own list. For all other ``n`` a
third may be gone, as without the check.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rasura.core.ciphers import SIGNATURE, verified
from rasura.defenses.secure_aggregation.graph import Bounds, counts


def quorum(clients: int, bounds: Bounds) -> int:
    """How many of a round's ``clients`` must sign a list: more than half of all honest and twice the colluding ones."""
    return (clients + counts(clients, bounds)[0]) // 2 + 1


def masked_text(context: bytes, present: bytes) -> bytes:
    """What a client signs with its masked update: ``context`` is the round's digest, ``present`` a bitmap of whose shares
    were there."""
    return b"rasura secure aggregation masked for 1" + context + present


def survivors_text(context: bytes, present: bytes, survivors: bytes) -> bytes:
    """What a client signs of the two bitmaps before it gives out shares."""
    return b"rasura secure aggregation survivors 1" + context + present + survivors


def all_signed(text: bytes, signers: Sequence[bytes], places: Iterable[int], signatures: bytes) -> bool:
    """Whether each of ``places``, an index into the public keys ``signers``, signed ``text``. The ``signatures`` are in the
    order of the places, one for each."""
    ordered = sorted(places)
    if len(signatures) != SIGNATURE * len(ordered):
        return False
    each = (signatures[k * SIGNATURE : (k + 1) * SIGNATURE] for k in range(len(ordered)))
    return all(verified(signers[place], one, text) for place, one in zip(ordered, each, strict=True))
