import pytest

from everburn.emulator.errors import ContextExceeded, InvalidInput, NonFinite
from everburn.emulator.training.datums import MICRO_BATCH_TOKENS, parse_submission

Payload = dict[str, object]


def tensor(values: list[object], dtype: str = "float32", **more: object) -> Payload:
    return {"data": values, "dtype": dtype, "shape": [len(values)], **more}


def datum(tokens: list[int], **inputs: Payload) -> Payload:
    return {
        "model_input": {"chunks": [{"tokens": tokens, "type": "encoded_text"}]},
        "loss_fn_inputs": {"target_tokens": tensor([*tokens], "int64"), **inputs},
    }


def submission(*data: Payload, loss_fn: str = "cross_entropy") -> Payload:
    return {"data": list(data), "loss_fn": loss_fn}


def policy_datum(advantages: list[object], logprobs: list[object]) -> Payload:
    return datum([1, 2], advantages=tensor(advantages), logprobs=tensor(logprobs))


def parse(payload: Payload):  # type: ignore[no-untyped-def]
    return parse_submission(payload, vocabulary=64, positions=128)


def test_a_submission_keeps_tokens_targets_and_weights() -> None:
    parsed = parse(submission(datum([3, 4], weights=tensor([0.0, 2.5]))))
    example = parsed.examples[0]
    assert example.tokens.tolist() == example.targets.tolist() == [3, 4]
    assert example.weights.tolist() == [0.0, 2.5]
    assert parsed.tokens == 2


def test_without_weights_every_position_counts_once() -> None:
    assert parse(submission(datum([3, 4]))).examples[0].weights.tolist() == [1.0, 1.0]


def test_chunks_of_one_input_are_joined() -> None:
    joined = datum([5, 6, 7])
    joined["model_input"] = {"chunks": [{"tokens": [5]}, {"tokens": [6, 7]}]}
    assert parse(submission(joined)).examples[0].tokens.tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("payload", "error", "complaint"),
    [
        (submission(), InvalidInput, "at least one datum"),
        (submission(datum([])), InvalidInput, "holds no token"),
        (submission(datum([64])), InvalidInput, r"token id 64, outside the vocabulary of 64"),
        (submission(datum([-1])), InvalidInput, r"token id -1"),
        (submission(datum([1] * 129)), ContextExceeded, "129 tokens.*128 positions"),
        (submission(datum([1], weights=tensor([1, 2]))), InvalidInput, "weights has 2 values"),
        (
            submission(datum([1], mask=tensor([1]))),
            InvalidInput,
            "mask, which cross_entropy does not",
        ),
        (submission(datum([1], weights=tensor(["x"]))), InvalidInput, "must hold numbers"),
        (submission(datum([1], weights=tensor([None]))), NonFinite, r"data\[0\].weights\[0\]"),
        (submission(datum([1], weights=tensor([1e39]))), NonFinite, "finite float32"),
        (
            submission(datum([1], weights=tensor([1], shape=[1, 1]))),
            InvalidInput,
            r"shape \[1, 1\]",
        ),
        (
            submission(datum([1], weights=tensor([1], sparse_crow_indices=[0, 1]))),
            InvalidInput,
            "sparse",
        ),
        (submission(datum([1]), loss_fn="ppo"), InvalidInput, "missing advantages"),
        (
            submission(policy_datum([1, float("nan")], [0, 0]), loss_fn="ppo"),
            NonFinite,
            r"advantages\[1\]",
        ),
        (
            submission(policy_datum([1, 1], [float("-inf"), 0]), loss_fn="ppo"),
            NonFinite,
            r"logprobs\[0\]",
        ),
        (submission(datum([1], target_tokens=tensor([1.5]))), InvalidInput, "integer token ids"),
        (
            submission({"model_input": {"chunks": [{"type": "image"}]}, "loss_fn_inputs": {}}),
            InvalidInput,
            "chunk of type 'image'",
        ),
    ],
)
def test_the_error_names_the_invalid_field(
    payload: Payload, error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        parse(payload)


def test_micro_batches_keep_the_order_and_bound_the_padded_size() -> None:
    lengths = [100, 3, 100, 5, 128, 128, 128, 1] * 3
    batches = list(parse(submission(*(datum([1] * n) for n in lengths))).micro_batches())
    assert [length for batch in batches for length in batch.lengths] == lengths
    assert all(batch.tokens.numel() <= MICRO_BATCH_TOKENS for batch in batches)
    assert len(batches) < len(lengths) / 2


def test_an_example_above_the_budget_is_a_micro_batch_of_its_own() -> None:
    long = parse_submission(
        submission(datum([1] * 3000), datum([1])), vocabulary=64, positions=4096
    )
    assert [batch.lengths for batch in long.micro_batches()] == [[3000], [1]]


def test_padding_carries_no_weight() -> None:
    (batch,) = parse(submission(datum([7, 8, 9]), datum([7]))).micro_batches()
    assert batch.tokens.tolist() == [[7, 8, 9], [7, 0, 0]]
    assert batch.weights.tolist() == [[1, 1, 1], [1, 0, 0]]
