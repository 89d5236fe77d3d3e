"""The check of docstrings accepts verbs and names of values, and finds fragments."""

import pytest

from tests.docstrings import docstrings_of

FUNCTION = 'def answer():\n    """{}"""\n'
PROPERTY = 'class Thing:\n    """A thing."""\n\n    @property\n    def answer(self):\n        """{}"""\n'
CLASS = 'class Answer:\n    """{}"""\n'


@pytest.mark.parametrize(
    ("code", "text", "bad"),
    [
        (FUNCTION, "Return the answer.", False),
        (FUNCTION, "Whether there is an answer.", False),
        (FUNCTION, "Inside this context, answer every call.", False),
        (FUNCTION, "The answer.", True),
        (FUNCTION, "``x``, answered.", True),
        (FUNCTION, "3 answers.", True),
        (FUNCTION, "By what a call is decided.", True),
        (PROPERTY, "The answer.", False),
        (PROPERTY, "What a call answers.", True),
        (CLASS, "An answer.", False),
        (CLASS, "What a call answers.", True),
    ],
)
def test_fragments_are_found(tmp_path, code, text, bad):
    file = tmp_path / "module.py"
    file.write_text(code.format(text))
    assert any(docstring.bad for docstring in docstrings_of(file)) == bad
