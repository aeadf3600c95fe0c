"""The table of public programs in the document has a row for each of them."""

import re

from tests.compatibility.__main__ import PAGE
from tests.compatibility.programs import PROGRAMS


def test_document_has_a_row_for_each_program() -> None:
    shown = PAGE.read_text().partition("<!-- programs:begin -->")[2].partition("<!-- programs:end -->")[0]
    assert re.findall(r"^\| ([^|]+) \|", shown, re.MULTILINE)[1:] == [program.name for program in PROGRAMS]
