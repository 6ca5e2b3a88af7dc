import pytest

from everburn.config.names import (
    ReferenceFormError,
    check_adapter,
    check_checkpoint,
    check_model_id,
    is_bare_name,
)

RUN = "run-" + "0123456789abcdef" * 2


@pytest.mark.parametrize("text", ["state-4", f"acme/{RUN}/state-4", "cross_job://job-1/step-4"])
def test_each_form_of_a_checkpoint(text: str) -> None:
    check_checkpoint(text)
    assert is_bare_name(text) == (text == "state-4")


@pytest.mark.parametrize(
    "text",
    [
        "policy-0004-e1-0123abcd",
        f"acme/{RUN}/policy-0004-e1-0123abcd",
        "accounts/acme/trainingSessions/ts-1/checkpoints/policy-0004-e1-0123abcd",
    ],
)
def test_a_sampler_snapshot_is_no_checkpoint(text: str) -> None:
    with pytest.raises(ReferenceFormError, match=r"is a sampler snapshot.*no optimizer state"):
        check_checkpoint(text)


@pytest.mark.parametrize(
    "text",
    ["", "tinker://x/y", "gs://bucket/x", "a/b", "acme/run-1/state-4", "cross_job://job", "State"],
)
def test_other_texts_are_told_the_forms(text: str) -> None:
    with pytest.raises(ReferenceFormError, match="isn't a checkpoint: write <account>/run-"):
        check_checkpoint(text)


def test_forms_of_an_adapter() -> None:
    check_adapter("accounts/acme/models/warm")
    check_adapter("gs://bucket/adapter")
    for text in ("warm", f"acme/{RUN}/state-4", ""):
        with pytest.raises(ReferenceFormError, match="isn't an adapter"):
            check_adapter(text)


@pytest.mark.parametrize("text", ["", "My-Model", "a_b", "x" * 64, "a/b"])
def test_what_cannot_be_the_id_of_a_model(text: str) -> None:
    check_model_id("x" * 63)
    with pytest.raises(ReferenceFormError, match="1 to 63 characters of a-z, 0-9 and '-'"):
        check_model_id(text)
