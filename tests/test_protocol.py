"""Public functions of `dissociation` called plainly, compiled, mapped over members and in a loop agree."""

import pytest
from protocol import check_agreement, rows_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("function", "make_call"), rows_of("dissociation."))
def test_plain_compiled_mapped_and_looped_agree(function, make_call):
    check_agreement(function, make_call)
