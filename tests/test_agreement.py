"""Records of the exchange before a payload moves."""

import json

import pytest

from para_core.agreement import RECORD_SIZE, error_record, raise_first_error


@pytest.mark.parametrize("letter", ["a", "é", "中", "😀", '"'])
def test_an_error_of_any_length_and_script_fits_into_a_record(letter):
    record = error_record(ValueError("expected 7 tokens " + letter * 5000))
    assert len(json.dumps(record)) <= RECORD_SIZE
    with pytest.raises(ValueError, match="sequence rank 1: expected 7 tokens"):
        raise_first_error([{"dtype": "float32"}, record])
