"""The in-memory cluster's verdicts on specs and edits, by the CRD's own schema and CEL rules, on the common table."""

from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.spec import IMMUTABLE
from ddpjob.cluster.base import Invalid
from ddpjob.cluster.memory import MemoryCluster
from ddpjob.cluster.memory.cel import compile_rule
from ddpjob.cluster.memory.celvalues import CelError, UnsupportedRuleError
from ddpjob.cluster.memory.quantities import canonical, is_quantity
from ddpjob.cluster.memory.schema import Schema
from tests.api.specs import BAD, GOOD, ILLEGAL_EDITS, LEGAL_EDITS, OK, Bad, Edit


def a_job(spec: dict[str, Any], name: str = "job") -> dict[str, Any]:
    identity = {"apiVersion": names.API_VERSION, "kind": "DDPJob", "metadata": {"name": name}}
    return identity | {"spec": {key: value for key, value in spec.items() if value is not None}}


async def edited(edit: Edit) -> None:
    cluster = MemoryCluster()
    await cluster.create(names.DDPJOBS, "default", a_job(OK | edit.before))
    before = {key: None for key in edit.before if key not in edit.after}
    await cluster.patch(names.DDPJOBS, "default", "job", {"spec": before | edit.after})


@pytest.mark.parametrize("spec", GOOD.values(), ids=GOOD.keys())
async def test_a_good_spec_is_accepted(spec: dict[str, Any]) -> None:
    await MemoryCluster().create(names.DDPJOBS, "default", a_job(spec))


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id)
async def test_a_bad_spec_is_refused_with_the_field_and_the_rules_own_words(bad: Bad) -> None:
    with pytest.raises(Invalid) as caught:
        await MemoryCluster().create(names.DDPJOBS, "default", a_job(bad.spec, bad.name))
    assert bad.field.split(".")[-1] in str(caught.value)
    assert bad.says in str(caught.value)


@pytest.mark.parametrize("edit", ILLEGAL_EDITS, ids=lambda edit: edit.id)
async def test_an_edit_of_what_is_immutable_is_refused(edit: Edit) -> None:
    with pytest.raises(Invalid, match=f"{edit.field} is immutable"):
        await edited(edit)
    assert edit.field in IMMUTABLE


@pytest.mark.parametrize("edit", LEGAL_EDITS, ids=lambda edit: edit.id)
async def test_an_edit_of_what_may_change_is_accepted(edit: Edit) -> None:
    await edited(edit)


CEL = {
    "1 + 2 == 3 && !(2 < 1)": True,
    "self.a == 1 || self.nothing == 2": True,
    "self.nothing == 2 || self.a == 1": True,
    "self.a == 2 && self.nothing == 2": False,
    "has(self.a) && !has(self.nothing)": True,
    "self.list.exists(x, x == 'two')": True,
    "self.list.all(x, size(x) == 3)": True,
    "self.list.filter(x, x.startsWith('t')).map(x, size(x)) == [3]": True,
    "self.list.exists_one(x, x in ['one', 'none'])": True,
    "type(self.a) == int ? self.a >= 1 : self.a == 'auto'": True,
    "type(self.s) == int ? self.s >= 1 : self.s == 'auto'": True,
    "self.s.matches('^a.*o$') && self.s.contains('ut') && self.s.endsWith('to')": True,
    "self.path.split('/').exists(part, part == '..')": True,
    "self.list[0] == \"one\" && self['a'] == 1": True,
    "self.yes == true && self.yes != 1": True,
    "-self.a < 0 && self.a - 1 == 0": True,
    "self.text.matches('^x$')": False,
}
SELF = {"a": 1, "s": "auto", "list": ["one", "two"], "path": "a/../b", "yes": True, "text": "x\n"}


@pytest.mark.parametrize("rule", CEL)
def test_a_cel_rule_means_what_the_language_says(rule: str) -> None:
    assert compile_rule(rule)({"self": SELF}) is CEL[rule]


@pytest.mark.parametrize("rule", ["self.nothing", "self.a < 'b'", "self.a", "size(self.a)", "self.list[5]", "self.a.b"])
def test_a_cel_rule_that_cannot_be_evaluated_is_an_error_not_a_verdict(rule: str) -> None:
    with pytest.raises(CelError):
        compile_rule(f"({rule}) || false")({"self": SELF})


@pytest.mark.parametrize("rule", ["self.", "a ** b", "self.a.frobnicate()", "isURL(self.s)", "has(1)", "self.a =="])
def test_a_cel_rule_beyond_the_subset_is_refused_and_not_ignored(rule: str) -> None:
    with pytest.raises(UnsupportedRuleError):
        compile_rule(rule)


def test_a_schema_keyword_that_is_not_understood_is_refused_and_not_ignored() -> None:
    with pytest.raises(NotImplementedError, match="multipleOf"):
        Schema.of({"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 2}}})


QUANTITIES = {
    **{"0": "0", "1": "1", "1000": "1k", "1500m": "1500m", "0.5": "500m", "1000m": "1", "1.5Gi": "1536Mi"},
    **{"1024Mi": "1Gi", "1023": "1023", "1024": "1024", "512Ki": "512Ki", "0.5Ki": "512", "1e3": "1e3", "12e6": "12e6"},
    **{"100u": "100u", "1000000": "1M", "-1": "-1", "+2": "+2", ".5": "500m", "5.": "5.", "1.1Ki": "1126400m"},
}


@pytest.mark.parametrize("text", QUANTITIES)
def test_a_quantity_is_written_as_the_api_server_writes_it(text: str) -> None:
    assert is_quantity(text)
    assert canonical(text) == QUANTITIES[text]


@pytest.mark.parametrize("text", ["", "x", "1x", "1 Gi", "Gi", "1KiB", True])
def test_what_is_no_quantity_is_told_from_one(text: object) -> None:
    assert not is_quantity(text)
