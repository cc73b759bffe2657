"""A training program, followed statement by statement, without running it: what reaches the model, and how often.

Functions of the same file are followed where they are called. A function that is never called is read as well, but nothing
may be trained in it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import rasura.accounting.configurations.kinds as k
from rasura.accounting.configurations.entering import Entering, Leaves
from rasura.accounting.configurations.expressions import Batch, Where
from rasura.accounting.configurations.facts import Value
from rasura.accounting.configurations.kinds import Kind, joined, parts, stale
from rasura.accounting.configurations.scopes import ENDS, Variable, last_name

_BINDING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Delete)
_LEAVING = {ast.Return: "return", ast.Break: "break", ast.Continue: "continue", ast.Raise: "raise"}


@dataclass
class Statements(Entering):
    """``passes``: the loops over the private loader that train, and how often each runs. ``read``: values of expressions."""

    read: Callable[[ast.expr], Value] = lambda _: None
    passes: dict[tuple[ast.AST, tuple[ast.AST, ...]], int | None] = field(default_factory=dict)

    def block(self, body: Sequence[ast.stmt], where: Where) -> Leaves:
        """Follow statements. After one that may leave by private values, nothing may be trained."""
        leaves: Leaves = set()
        for one in body:
            leaves |= self.statement(one, where)
            if "private" in leaves:
                where = where.bar("private values decide whether it is reached")._replace(private=True)
        return leaves

    def statement(self, node: ast.stmt, where: Where) -> Leaves:
        """Follow a statement."""
        if where.private and isinstance(node, _BINDING):
            self.doubt(node, f"{ast.unparse(node).splitlines()[0][:80]} depends on private values")
        if isinstance(node, ast.Expr):
            self.kind(node.value, where)
            if isinstance(node.value, ast.Call) and last_name(node.value.func) in ENDS:
                return self._leave(node, where)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            self.assignment(node, where)
        elif isinstance(node, ast.For):
            return self._for(node, where)
        elif isinstance(node, ast.While):
            return self._while(node, where)
        elif isinstance(node, ast.If):
            return self._if(node, where)
        elif isinstance(node, ast.With):
            return self._with(node, where)
        elif isinstance(node, ast.Try):
            return self._try(node, where)
        elif isinstance(node, ast.Return | ast.Break | ast.Continue | ast.Raise):
            return self._leave(node, where)
        elif isinstance(node, ast.Assert):
            failed = where.by(self.kind(node.test, where))
            if node.msg is not None:
                self.kind(node.msg, failed)
            if failed.private:
                return self._leave(node, failed)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for default in (*node.decorator_list, *node.args.defaults, *(one for one in node.args.kw_defaults if one)):
                if strange := parts(self.kind(default, where.bar("it stands in the head of a function"))) - {k.PUBLIC}:
                    self.doubt(default, f"the {min(strange)} is kept in the head of {node.name}")
        elif isinstance(node, ast.ClassDef):
            self.block([one for one in node.body if not isinstance(one, ast.FunctionDef)], where.bar("it stands in a class"))
        elif isinstance(node, ast.Match | ast.AsyncFor | ast.AsyncWith | ast.TryStar):
            inner = [one for one in ast.walk(node) if isinstance(one, ast.stmt) and one is not node]
            return self.block(inner, where.bar("it stands under match or async")._replace(private=True))
        return set()

    # --- branches and loops

    def _leave(self, node: ast.stmt, where: Where) -> Leaves:
        how = _LEAVING.get(type(node), "raise")  # as is the end of the program
        value = node.value if isinstance(node, ast.Return) else node.exc if isinstance(node, ast.Raise) else None
        kind = self.kind(value, where) if value is not None else k.PUBLIC
        if how == "return" and self.returned:
            if where.private:
                kind = joined((kind, k.FIGURE))
            self.returned[-1].append(kind)
        if where.batch is not None and (how != "return" or where.within):
            self.doubt(node, f"{how} may leave out a part of the loop over the loader")
        return {how, "private"} if where.private else {how} if where.within else set()

    def _branch(self, bodies: Sequence[Sequence[ast.stmt]], where: Where) -> Leaves:
        """Follow the sides of a branch by themselves, and join what they leave."""
        before, mode, after, leaves = dict(self.env), self.evaluating, [], set[str]()
        for body in bodies:
            self.env, self.evaluating = dict(before), mode
            leaves |= self.block(body, where._replace(within=True))
            after.append((self.env, self.evaluating))
        self.evaluating = all(evaluating for _, evaluating in after)
        self.env = self._joined([env for env, _ in after])
        return leaves

    def _joined(self, environments: Sequence[dict[Variable, Kind]]) -> dict[Variable, Kind]:
        names = {name for env in environments for name in env}
        return {name: joined([env.get(name, self._unbound(name)) for env in environments]) for name in names}

    def _unbound(self, name: Variable) -> Kind:
        return k.PLAIN if name in self.inputs else k.PUBLIC

    def _if(self, node: ast.If, where: Where) -> Leaves:
        private = bool(parts(self.kind(node.test, where)) & k.DATA)
        shown = ast.unparse(node.test)[:60]
        if private:
            where = where.bar(f"private values decide whether it runs ({shown})")._replace(private=True)
        elif where.batch is not None:
            where = where.bar("it stands under if, in the loop over the loader")
        elif shown in ("__name__ == '__main__'", "'__main__' == __name__") and not node.orelse:
            return self.block(node.body, where)
        return self._branch((node.body, node.orelse), where)

    def _try(self, node: ast.Try, where: Where) -> Leaves:
        where = where.bar("it stands under try")
        leaves = self._branch((node.body,), where)
        names = (one for part in node.body for one in ast.walk(part) if isinstance(one, ast.Name))
        inner = where.by(tuple(self.env.get(self.scopes.variable(one.id, one), k.PUBLIC) for one in names))
        if inner.private or "private" in leaves:  # private values may decide whether there is an error
            inner = inner._replace(private=True)
            leaves |= self._branch((node.body,), inner)
        leaves |= self._branch(([], *(one.body for one in node.handlers)), inner)
        return leaves | self.block(node.orelse, inner) | self.block(node.finalbody, where)

    def _with(self, node: ast.With, where: Where) -> Leaves:
        closed: list[Variable] = []
        for item in node.items:
            kind = self.kind(item.context_expr, where)
            call = item.context_expr.func if isinstance(item.context_expr, ast.Call) else item.context_expr
            name = self.scopes.original(call)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, kind, where)
                if name == "BatchMemoryManager" and isinstance(item.optional_vars, ast.Name):
                    closed.append(self.scopes.variable(item.optional_vars.id, item.optional_vars))
            if name in ("no_grad", "inference_mode"):
                where = where._replace(blind=True)
            elif name not in k.CONTEXTS:
                where = where.bar(f"it stands under with {name}, which is not known here")
        leaves = self.block(node.body, where)
        self.env |= dict.fromkeys(closed, k.PUBLIC)
        return leaves

    def _while(self, node: ast.While, where: Where) -> Leaves:
        if where.batch is not None:
            where = where.bar("it stands under while, in the loop over the loader")
        if isinstance(node.test, ast.Constant):
            where = where.bar("it stands under while without a condition, so that nothing says how often it runs")
        where = where._replace(times=None)
        leaves = self._repeated(node.body, where, lambda place: self.kind(node.test, place))
        return self._after(node, leaves, where)

    def _repeated(self, body: Sequence[ast.stmt], where: Where, start: Callable[[Where], Kind | None]) -> Leaves:
        """Follow the body of a loop until the kinds of the variables stay as they are.

        ``start`` is what happens before each time; the body runs again if the kind that it returns says so.
        """
        leaves: Leaves = set()
        for _ in range(6):
            before = dict(self.env)
            if parts(start(where) or k.PUBLIC) & k.DATA:
                where = where.bar("private values decide how often it runs")._replace(private=True)
            found = self.block(body, where._replace(within=True))
            leaves |= found
            again = "private" in found and not where.private
            if again:
                where = where.bar("private values decide whether it runs, or how often")._replace(private=True)
            self.env = self._joined((before, self.env))
            if self.env == before and not again:
                break
        return leaves

    def _after(self, node: ast.For | ast.While, leaves: Leaves, where: Where) -> Leaves:
        """Follow what stands under ``else`` of a loop, which does not run after ``break``."""
        kept = leaves - {"break", "continue"} if leaves & {"return", "raise"} else set()
        return kept | self.block(node.orelse, where._replace(private=where.private or "private" in leaves))

    def _for(self, node: ast.For, where: Where) -> Leaves:
        kind = self.kind(node.iter, where)
        if kind in (k.LOADER, k.NUMBERED):
            return self._drawn(node, kind == k.NUMBERED, where)
        inner = where._replace(times=self._times(node.iter, where.times))
        if parts(kind) & k.DATA:
            inner = inner.bar(f"private values decide how often it runs ({ast.unparse(node.iter)[:60]})")._replace(
                private=True
            )
        elif where.batch is not None:
            inner = inner.bar("it stands in a loop in the loop over the loader")
        elif not self._ranges(node.iter):
            inner = inner.bar(f"it stands in a loop over {ast.unparse(node.iter)[:60]}, which is not the loader")
        element = self.element(node.iter, kind)
        self.shares(node.target, node.iter)
        leaves = self._repeated(node.body, inner, lambda place: self.bind(node.target, element, place))
        return self._after(node, leaves, where)

    def _drawn(self, node: ast.For, numbered: bool, where: Where) -> Leaves:
        """The loop over the private loader: one loss and one step for each batch, and nothing left out."""
        if where.batch is not None:
            self.doubt(node, "a loop over the loader stands in another")
        batch = Batch()

        def start(_: Where) -> None:
            self.env = {name: stale(kind) for name, kind in self.env.items()}
            for made in (batch.forwards, batch.backwards, batch.steps):
                made.clear()
            self.bind(node.target, (k.PUBLIC, k.BATCH) if numbered else k.BATCH, where)

        leaves = self._repeated(node.body, where._replace(batch=batch, within=False), start)
        self.env = {name: stale(kind) for name, kind in self.env.items()}
        self._counted(node, batch, where)
        return self._after(node, leaves, where)

    def _counted(self, node: ast.For, batch: Batch, where: Where) -> None:
        """Doubt more or less than one step for each batch that is trained on."""
        if len(batch.steps) > 1:
            lines = ", ".join(str(getattr(one, "lineno", 1)) for one, _ in batch.steps)
            self.doubt(node, f"each batch is stepped on {len(batch.steps)} times (lines {lines}), which counts as one draw")
        if batch.backwards and (len(batch.backwards) > 1 or len(batch.forwards) != 1):
            self.doubt(node, "each batch passes through the model more than once, so that one example reaches several clips")
        if batch.backwards and not batch.steps:
            self.doubt(node, "the gradients of several batches add up before a step")
        if batch.steps:
            self.passes[node, where.calls] = where.times

    def _ranges(self, node: ast.expr) -> ast.Call | None:
        """The call of ``range`` or ``trange`` in an expression, if it is one."""
        while isinstance(node, ast.Call) and self.scopes.original(node.func) in ("enumerate", "tqdm") and node.args:
            node = node.args[0]
        named = isinstance(node, ast.Call) and self.scopes.original(node.func) in ("range", "trange")
        return node if isinstance(node, ast.Call) and named and self.scopes.library(node.func) in ("", "tqdm") else None

    def _times(self, node: ast.expr, times: int | None) -> int | None:
        """How often the body of a loop runs in all, None if that is not written."""
        call = self._ranges(node)
        ends = [self.read(one) for one in call.args] if call is not None else []
        whole = [one for one in ends if isinstance(one, int) and not isinstance(one, bool)]
        if call is None or call.keywords or times is None or len(whole) != len(ends) or not 1 <= len(whole) <= 2:
            return None
        return times * max(0, whole[-1] - (whole[0] if len(whole) == 2 else 0))
