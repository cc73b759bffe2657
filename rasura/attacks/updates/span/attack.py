"""The span attack: exact tokens from the row space of attention gradients, then sentences, then verification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from rasura.attacks.shared.mechanism import announced_dropout
from rasura.attacks.shared.twins import row_norms
from rasura.attacks.shared.untwinned import untwinned
from rasura.attacks.shared.verify import in_span, prove, verified
from rasura.attacks.updates.span.assembling import MAX_COPIES, Sentences, arranged, assembled, completed
from rasura.attacks.updates.span.attended import Attended, attended
from rasura.attacks.updates.span.chains import or_chained
from rasura.attacks.updates.span.completion import few_hidden, uncovered
from rasura.attacks.updates.span.decay import less_decay
from rasura.attacks.updates.span.endings import finish
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.leverage import or_by_leverage
from rasura.attacks.updates.span.null import each_once, prefixes_believed, rows_believed, tokens_believed
from rasura.attacks.updates.span.prefixes import grow
from rasura.attacks.updates.span.rates import searched
from rasura.attacks.updates.span.rows import (
    FULL,
    RowSpace,
    adapter_spaces,
    as_sent,
    block_spaces,
    blocks_that_tell,
    blocks_to_read,
    visible_blocks,
)  # fmt: skip
from rasura.attacks.updates.span.scan import Scan
from rasura.attacks.updates.span.stand_ins import hidden_by, stand_ins
from rasura.attacks.updates.span.tokens import Row, candidates, clearest, hold_named, plain, tell_rows
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.specs import AttackSpec, Home
from rasura.core.updates import announced_update
from rasura.core.values import UNKNOWN, Grant, Observation, Parameter, Reconstruction
from rasura.victims.models import parts


@dataclass(frozen=True)
class Span:
    """DAGER (Petrov et al. 2024), extended to exact decomposition, any visible block of a decoder, and active dropout.

    Encoders: tokens with their positions from block 0, fitted by message passing where dropout zeroes coordinates; several
    texts are told apart by a layer that has seen the context, or, under dropout, by the query and key gradients. Decoders:
    prefixes grown from whichever layer is visible (``predicted``). Needs fewer tokens in the batch than it has inputs.
    """

    name: str = "span"
    needs: frozenset[Grant] = frozenset({Grant.MODEL, Grant.BASE_MODEL})
    uses: frozenset[Grant] = frozenset({Grant.BATCH_SIZE, Grant.LABELS, Grant.LENGTHS, Grant.MECHANISM})
    work: Mapping[str, tuple[int, int, int]] = field(
        default_factory=lambda: {"quick": (96, 8, 2), "default": (400, 32, 8), "paper": (1600, 128, 16)}
    )
    """Budget level -> candidates fitted at a position, rounds that look for copies, random texts per text of the batch."""
    adaptive: bool = True
    """If true, fits what dropout left and completes hidden entries; otherwise a hidden entry counts as zero, as it was
    sent."""

    def __call__(self, seen: Observation, *, rng: torch.Generator, budget: Budget) -> Reconstruction:
        if not self.adaptive:
            return self._read(as_sent(seen), rng, budget)
        guess = or_chained(or_by_leverage(lambda: self._read(seen, rng, budget), seen), seen)
        if guess.confidence == "verified" or not few_hidden(seen) or not parts(seen.model).causal:
            return guess
        # Completing hidden entries of a nearly full row space may lose a dimension. As sent, they may be proven.
        with suppress(NotApplicable, AttackFailed):
            sent = replace(self, adaptive=False)(seen, rng=rng, budget=budget)
            proof = prove(seen, sent.tokens) if sent.ordered else None
            if proof is not None:
                return verified(proof, sent.details)
        return guess

    def _read(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        known = parts(seen.model)  # the first visible block names tokens; one or two deeper ones tell texts apart
        wanted = 1 if Grant.BATCH_SIZE in seen and seen.batch_size == 1 and not known.causal else 3
        observed, seen = seen, uncovered(less_decay(seen), wanted)
        dropout = announced_dropout(seen) if self.adaptive else 0.0
        others = stand_ins(seen) if self.adaptive and known.causal and not (dropout or blocks_that_tell(seen)) else ()
        spaces = adapter_spaces(seen, wanted) if self.adaptive and not dropout else {}
        spaces = spaces or block_spaces(seen, others or blocks_to_read(seen)[:wanted], wanted)
        if not spaces:
            raise AttackFailed(f"the gradients show no row space: {hidden_by(seen, others)}")
        inputs = Inputs(seen.model, others)
        longest = max(seen.lengths) if Grant.LENGTHS in seen else max(space.rank for space in spaces.values()) + 1
        ids = candidates(seen.vocabulary)
        scan = Scan(spaces[0], inputs, ids, longest, row_norms(seen)) if 0 in spaces else None
        if known.causal and any(k > 0 for k in spaces) and not dropout:
            texts = self._decoder(observed, seen, spaces, inputs, scan)
            if texts is not None:
                return texts
            spaces = {0: spaces[0]}
        if scan is None:
            if visible_blocks(seen)[0].index == 0:
                raise AttackFailed("block 0 shows no row space: rounding or noise hides it")
            raise NotApplicable("block 0 is hidden or zero, so tokens cannot be tested one by one; try span-matching")
        return self._by_position(observed, seen, spaces, scan, dropout, rng, budget)

    def _decoder(
        self,
        observed: Observation,
        seen: Observation,
        spaces: Mapping[int, RowSpace],
        inputs: Inputs,
        scan: Scan | None,
    ) -> Reconstruction | None:
        """Texts grown from prefixes. None where only block 0 is informative, for example when the batch has more different
        prefixes than the layer has inputs, but fewer different tokens."""
        first = spaces.get(0)
        if first is not None:
            # A deeper block tells at least as many inputs apart; much less is a gap among singular values that is none.
            spaces = {k: space for k, space in spaces.items() if 2 * space.rank >= first.rank}
            if len(spaces) == 1:
                return None
        size = seen.batch_size if Grant.BATCH_SIZE in seen else None
        # The last token of a causal text has no gradient.
        lengths = tuple(n - (seen.task == "causal") for n in seen.lengths) if Grant.LENGTHS in seen else None
        longest = max(lengths) if lengths else max(s.rank for s in spaces.values()) + 1
        ids = candidates(seen.vocabulary)
        chosen = grow(seen, spaces, inputs, ids, scan=scan, longest=longest, batch_size=size, lengths=lengths)
        if not chosen and first is None:
            raise AttackFailed("no token's state lies in the visible row spaces")
        prefixes = [p.tokens for p in chosen]
        if scan is not None and not hold_named(prefixes, scan):
            return None
        believed = prefixes_believed(spaces, inputs, ids, prefixes)
        texts = finish(observed, seen, prefixes, inputs, search=believed)
        plain_texts: Sentences = [[(t, 0) for t in text] for text in texts]
        return self._judged(observed, plain_texts, max(p.residual for p in chosen), spaces, lambda: believed)

    def _by_position(
        self,
        observed: Observation,
        seen: Observation,
        spaces: Mapping[int, RowSpace],
        scan: Scan,
        dropout: float,
        rng: torch.Generator,
        budget: Budget,
    ) -> Reconstruction:
        space, inputs, ids = scan.space, scan.inputs, scan.ids
        positional = inputs.parts.position_embedding is not None
        size = seen.batch_size if Grant.BATCH_SIZE in seen else 0
        known_length = Grant.LENGTHS in seen
        longest = min(max(seen.lengths) if known_length else space.rank, scan.places)
        rows, likely = list[Row](), list[list[int]]()
        owed, active = 0, dropout > 0
        if not active or not positional:  # of most decoders without positions, dropout leaves the embeddings as they are
            steps = announced_update(seen).kind != "fedsgd"
            rows = self._plain(scan, longest, known_length, placed=positional and size == 1, several=steps)
        named = any(row.token not in seen.vocabulary.special_ids for row in rows)
        if not named and self.adaptive and space.tokens is None:
            active = True  # somebody said that dropout was, or no word lies in the span as it is
            look = searched(
                scan, longest, dropout, copies=size or MAX_COPIES, opening=seen.vocabulary.prefix if size else (),
                known_length=known_length, work=self.work[budget.level][:2], rng=rng,
            )  # fmt: skip
            rows, owed = look.rows, look.owed
            likely = [[t for t in ids.tolist() if t not in seen.vocabulary.special_ids] for ids in look.nearest]
        if not rows:
            raise AttackFailed("no token's input lies in the row space of block 0")
        if not positional:
            return self._unplaced(observed, seen, spaces, scan, rows, size, active, rng, budget)
        size = size or max(Counter(row.position for row in rows).values())
        texts = assembled(seen, spaces, inputs, rows, size, active, rng, self.work[budget.level][2])
        if active:
            texts = [completed(text, likely, seen.vocabulary) for text in texts]
        if seen.task == "causal":  # the last token has no gradient
            texts = [[*text, (UNKNOWN, 0)] for text in texts]

        def believed() -> bool:
            if not active:
                return tokens_believed(space, inputs, ids, texts, positional=True)
            fitted = each_once(rows, texts, seen.vocabulary.special_ids)
            return fitted and rows_believed(space, rows, len(ids) * longest, owed)

        return self._judged(observed, texts, max(row.residual for row in rows), spaces, believed, active)

    def _unplaced(
        self,
        observed: Observation,
        seen: Observation,
        spaces: Mapping[int, RowSpace],
        scan: Scan,
        rows: list[Row],
        size: int,
        active: bool,
        rng: torch.Generator,
        budget: Budget,
    ) -> Reconstruction:
        """The texts of ``rows`` whose places block 0 does not tell; the rows as a bag if nothing else gives their order."""
        bag = tuple(row.token for row in rows)
        order = attended(seen, bag, size=size) if self.adaptive else None
        if order is not None:
            return self._in_order(observed, order, scan, spaces)
        # Only a proof tells whether any other order is the one that fits, and there is none under dropout.
        ordered = [] if active else arranged(seen, spaces, scan.inputs, rows, size, rng, self.work[budget.level][2])
        if ordered:
            guess = self._judged(seen, ordered, max(row.residual for row in rows), spaces, lambda: False)
            if guess.confidence == "verified":
                return guess
        return in_span(
            (bag,) * max(1, size), seen, residual=max(r.residual for r in rows), ordered=False,
            believed=tokens_believed(scan.space, scan.inputs, scan.ids, [[(t, 0) for t in bag]], positional=False),
        )  # fmt: skip

    def _in_order(
        self, observed: Observation, order: Attended, scan: Scan, spaces: Mapping[int, RowSpace]
    ) -> Reconstruction:
        def believed() -> bool:
            bag = [[(t, 0) for t in sorted({t for text in order.texts for t in text})]]
            return order.whole and tokens_believed(scan.space, scan.inputs, scan.ids, bag, positional=False)

        texts: Sequence[tuple[int, ...]] = order.texts
        if order.active and observed.task == "causal":  # the last token has no gradient
            texts = [(*text, UNKNOWN) for text in texts]
        elif not order.active:
            texts = finish(observed, observed, texts, scan.inputs, search=order.whole)
        named: Sentences = [[(t, 0) for t in text] for text in texts]
        return self._judged(observed, named, order.residual, spaces, believed, order.active)

    def _plain(self, scan: Scan, longest: int, known_length: bool, *, placed: bool, several: bool) -> list[Row]:
        """The rows that the plain test names. Of ``several`` steps of a client, those before a clear gap, too."""
        rows, rank = list[Row](), scan.space.rank
        for position in range(longest):
            here = plain(scan, position)
            if self.adaptive and rows and (several or (not here and len(rows) < rank)):
                here = max(here, clearest(scan, position), key=len)
            rows += here
            tell_rows(rows, placed=placed)
            if len(here) > 2 * rank:
                width, why = scan.inputs.parts.hidden, "rounding or noise blurs it"
                if rank >= FULL * width:
                    why = "the batch has about as many tokens as the layer has inputs"
                raise AttackFailed(f"the row space (rank {rank} of {width}) accepts more tokens than it can hold: {why}")
            if not here and not known_length:
                break
        return rows

    def _judged(
        self,
        seen: Observation,
        texts: Sentences,
        residual: float,
        spaces: Mapping[int, RowSpace],
        believed: Callable[[], bool],
        active: bool = False,
    ) -> Reconstruction:
        tokens, count = tuple(tuple(t for t, _ in text) for text in texts), len(parts(seen.model).blocks)
        details: dict[str, Parameter] = {
            "rank": max(s.rank for s in spaces.values()),
            "blocks": ",".join("output" if k >= 2 * count else str(k % count) for k in sorted(spaces)),
            "dropout_fit": active,
        }
        types = [[s for _, s in text] for text in texts]
        proof = None if active else prove(seen, tokens, types)
        if proof is None and not active and (told := untwinned(seen, tokens, types)) != tokens:
            proof = prove(seen, told, types)
        if proof is not None:
            return verified(proof, details)
        return in_span(tokens, seen, believed=believed(), residual=residual, details=details)


def dager() -> Span:
    """DAGER as published: the plain test of blocks 0 and 1. Hidden entries count as zeros, and dropout is taken for off."""
    return Span("dager", uses=frozenset({Grant.BATCH_SIZE, Grant.LABELS, Grant.LENGTHS}), adaptive=False)


SPEC = AttackSpec(
    name="span",
    about="recovers exact tokens from attention gradients, also under dropout and from any block of a decoder",
    source="Petrov et al. 2024 (DAGER), sec. 4; extensions: see the module",
    make=Span,
    seconds=0.6,
    growth=0.15,
    pairs=125.0,
    work={"quick": 0.9, "default": 1.0, "paper": 3.0},
    home=Home(reads=True),
)

DAGER = AttackSpec(
    name="dager",
    about="the plain span test of blocks 0 and 1; hidden entries count as zeros",
    source="Petrov et al. 2024 (DAGER), Algorithms 1 and 2",
    make=dager,
    seconds=0.6,
    growth=0.15,
    pairs=125.0,
    work={"quick": 0.9, "default": 1.0, "paper": 3.0},
    home=Home(reads=True),
)
