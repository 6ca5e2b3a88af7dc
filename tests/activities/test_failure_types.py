"""Which errors Temporal tries again."""

import pytest
from temporalio.exceptions import ApplicationError

from activities.failure_types import final_errors
from everburn.records.store import CorruptArtifactError, StoreError, StoreFullError


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        (StoreError("can't read it"), True),
        (StoreFullError("no space"), True),
        (CorruptArtifactError("it isn't JSON"), False),
        (ValueError("it makes no sense"), False),
    ],
)
def test_a_store_is_asked_again_and_a_corrupt_file_is_not(error: Exception, retryable: bool):
    with pytest.raises(ApplicationError) as caught, final_errors(StoreError):
        raise error
    assert (caught.value.type, caught.value.non_retryable) == (type(error).__name__, not retryable)
