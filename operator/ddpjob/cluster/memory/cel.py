"""Evaluates the CEL rules of the CRD, so that the schema alone decides and no rule is written down a second time.

A subset of https://github.com/google/cel-spec: literals, selection, index, the operators, ``has`` and the
comprehension macros, and the functions in ``celvalues.py``. ``compile_rule`` refuses everything else.
"""

import re
from collections.abc import Callable
from functools import cache

from ddpjob.cluster.memory import celvalues as values
from ddpjob.cluster.memory.celvalues import CelError, Expression, Scope, UnsupportedRuleError

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<float>\d+\.\d+)|(?P<int>\d+)"""
    r"""|(?P<name>[A-Za-z_]\w*)|(?P<op>\|\||&&|==|!=|<=|>=|[-+*/%<>!?:.,()\[\]]))"""
)
_TYPES = {"int": int, "string": str, "bool": bool, "double": float, "list": list, "map": dict, "null_type": type(None)}
_LITERALS = {"true": True, "false": False, "null": None}
_MACROS = ("exists", "all", "exists_one", "filter", "map")


@cache
def compile_rule(text: str) -> Expression:
    """The rule as a function of its variables (``self``, ``oldSelf``). Raises ``UnsupportedRuleError``."""
    return _Parser(text).parse()


def is_transition_rule(text: str) -> bool:
    """Whether the rule compares with the value before, and so holds of updates alone."""
    return re.search(r"\boldSelf\b", text) is not None


class _Parser:
    """Recursive descent; each method returns a function that evaluates what it read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str]] = []
        position, text = 0, text.rstrip()
        while position < len(text):
            found = _TOKEN.match(text, position)
            if found is None:
                raise UnsupportedRuleError(f"cannot read {text[position : position + 10]!r} in {text!r}")
            self._tokens.append((str(found.lastgroup), found.group(str(found.lastgroup))))
            position = found.end()
        self._position = 0

    def parse(self) -> Expression:
        result = self._conditional()
        if self._position < len(self._tokens):
            raise UnsupportedRuleError(f"cannot read {self._peek()!r} in {self._text!r}")
        return result

    def _peek(self) -> str:
        return self._tokens[self._position][1] if self._position < len(self._tokens) else ""

    def _take(self) -> tuple[str, str]:
        if self._position >= len(self._tokens):
            raise UnsupportedRuleError(f"{self._text!r} ends too early")
        self._position += 1
        return self._tokens[self._position - 1]

    def _accept(self, *operators: str) -> str:
        if self._peek() in operators and self._tokens[self._position][0] in ("op", "name"):
            return self._take()[1]
        return ""

    def _expect(self, operator: str) -> None:
        if not self._accept(operator):
            raise UnsupportedRuleError(f"expected {operator!r}, not {self._peek()!r}, in {self._text!r}")

    def _conditional(self) -> Expression:
        condition = self._either(("||",), lambda: self._either(("&&",), self._relation))
        if not self._accept("?"):
            return condition
        yes = self._conditional()
        self._expect(":")
        no = self._conditional()
        return lambda scope: yes(scope) if values.truth(condition(scope)) else no(scope)

    def _either(self, operators: tuple[str], operand: Callable[[], Expression]) -> Expression:
        """``||`` or ``&&``: an error on one side does not matter where the other side decides."""
        terms = [operand()]
        while self._accept(*operators):
            terms.append(operand())
        if len(terms) == 1:
            return terms[0]
        deciding = operators == ("||",)

        def evaluate(scope: Scope) -> bool:
            error: CelError | None = None
            for term in terms:
                try:
                    if values.truth(term(scope)) is deciding:
                        return deciding
                except CelError as raised:
                    error = raised
            if error is not None:
                raise error
            return not deciding

        return evaluate

    def _relation(self) -> Expression:
        left = self._sum()
        while operator := self._accept("==", "!=", "<=", ">=", "<", ">", "in"):
            left = values.relation(operator, left, self._sum())
        return left

    def _sum(self) -> Expression:
        left = self._unary()
        while operator := self._accept("+", "-"):
            left = values.total(operator, left, self._unary())
        return left

    def _unary(self) -> Expression:
        if self._accept("!"):
            inner = self._unary()
            return lambda scope: not values.truth(inner(scope))
        if self._accept("-"):
            inner = self._unary()
            return lambda scope: -inner(scope)
        return self._member()

    def _member(self) -> Expression:
        value = self._primary()
        while operator := self._accept(".", "["):
            if operator == "[":
                value = values.index(value, self._conditional())
                self._expect("]")
                continue
            name = self._take()[1]
            value = self._call(value, name) if self._accept("(") else values.select(value, name)
        return value

    def _call(self, target: Expression, name: str) -> Expression:
        if name in _MACROS:
            variable = self._take()[1]
            self._expect(",")
            body = self._conditional()
            self._expect(")")
            return values.macro(name, target, variable, body)
        if name not in values.METHODS:
            raise UnsupportedRuleError(f"no method {name!r}, in {self._text!r}")
        return values.apply(values.METHODS[name], [target, *self._arguments()])

    def _arguments(self, end: str = ")") -> list[Expression]:
        arguments: list[Expression] = []
        while not self._accept(end):
            arguments.append(self._conditional())
            if self._peek() != end:
                self._expect(",")
        return arguments

    def _primary(self) -> Expression:
        kind, text = self._take()
        if kind in ("string", "int", "float"):
            constant = re.sub(r"\\(.)", r"\1", text[1:-1]) if kind == "string" else values.number(text)
            return lambda scope: constant
        if text == "(":
            inner = self._conditional()
            self._expect(")")
            return inner
        if text == "[":
            items = self._arguments("]")
            return lambda scope: [item(scope) for item in items]
        if kind != "name":
            raise UnsupportedRuleError(f"cannot read {text!r} in {self._text!r}")
        return self._named(text)

    def _named(self, name: str) -> Expression:
        if name in _LITERALS:
            return lambda scope: _LITERALS[name]
        if not self._accept("("):
            return lambda scope: scope[name] if name in scope else _TYPES[name]
        if name == "has":
            present = values.presence(self._member())
            self._expect(")")
            return present
        if name not in values.FUNCTIONS:
            raise UnsupportedRuleError(f"no function {name!r}, in {self._text!r}")
        return values.apply(values.FUNCTIONS[name], self._arguments())
