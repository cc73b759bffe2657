"""Secure aggregation: a server learns the sum of the clients' updates, and no client or server holds a key to one update.

After SecAgg+ (Bell et al. 2020, the protocol against a server that follows it and colludes with some clients). Each client
adds a mask of its own and one mask for each neighbour in a sparse random graph; masks of neighbours cancel out. What
opens a client's own mask, or its masks with its neighbours if it disappears, is shared among those neighbours (Shamir): the
server needs ``threshold`` of them, and is given one of the two kinds for a client, never both.

Plain values and bytes, without a network: ``Client`` and ``Server`` take messages and give messages, by stages.

1. ``keys``: two fresh public keys of every client. All get the whole list, and derive the same graph from it.
2. ``shares``: the shares for each neighbour, encrypted for it alone.
3. ``masked``: the masked update.
4. ``signed``, where clients have identities: a signature under the list of survivors, which all check (``consistency``).
5. ``revealed``: the shares by which the server removes the masks from the sum.

What it guarantees, what it costs and what a malicious server could do: ``docs/secure-aggregation.md``.
"""
