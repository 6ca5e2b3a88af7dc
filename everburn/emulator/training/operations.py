"""Training operations, each from the JSON of its request to the JSON of its result.

A function returns Work for the compute thread. Its exception becomes the operation's result, not an
HTTP error: after a 4xx at submission the SDK's client would stay unusable.

Doesn't own ordering (futures.py) or the model (engine.py).
"""

import dataclasses
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar, cast, get_args

from everburn.emulator.compute import Work
from everburn.emulator.errors import (
    CheckpointMismatch,
    CheckpointNotFound,
    InvalidInput,
    NameTaken,
    UnsupportedOperation,
)
from everburn.emulator.http import wire
from everburn.emulator.models.bases import Bases, SamplerWeights
from everburn.emulator.models.registry import ModelStore
from everburn.emulator.sessions import Model
from everburn.emulator.training.checkpoints import CheckpointRef, CheckpointStore
from everburn.emulator.training.datums import Submission, parse_submission
from everburn.emulator.training.engine import Engine, ForwardOutput, TrainingState
from everburn.emulator.training.futures import Result
from everburn.emulator.training.spec import AdamSettings, ModelSpec, Normalization

T = TypeVar("T")
Body = Mapping[str, Any]

CROSS_JOB = "cross_job://"
SNAPSHOT_TYPES = ("base", "delta", "merged_base")

CAPABILITIES: Mapping[str, Any] = {
    "comms": "v1",
    "supports_reinforce": True,
    "supports_policy_importance_sampling": True,
    "supports_policy_diagnostics": True,
    "supports_score_centering": False,
    "supports_target_logprob_support": False,
    "supports_router_replay": False,
}
"""What create_model advertises: exactly what is implemented."""


def single_slice(action: Callable[[], T]) -> Work[T]:
    """Work of a single slice."""
    yield from ()
    return action()


def create_engine(bases: Bases, body: Body, job_rank: int | None = None) -> Work[Engine]:
    """The engine of a create_model request; takes minutes if the base model must be made.

    job_rank: largest LoRA rank of a dedicated job, 0 for full parameters; None if serverless.
    """

    def create() -> Engine:
        spec = _spec(body)
        if job_rank is not None and not spec.frozen and not _rank_fits(spec.rank, job_rank):
            raise InvalidInput(
                f"a model of LoRA rank {spec.rank} doesn't fit a trainer job of rank {job_rank}"
            )
        return Engine(bases.get(spec.base_model), spec)

    return single_slice(create)


def forward(model: Model, body: Body) -> Work[Result]:
    return _pass(model, body.get("forward_input"), model.engine.forward)


def forward_backward(model: Model, body: Body) -> Work[Result]:
    return _pass(model, body.get("forward_backward_input"), model.engine.forward_backward)


def optim_step(model: Model, body: Body) -> Work[Result]:
    def step() -> Result:
        parameters = body.get("adam_params")
        if not isinstance(parameters, dict):
            raise InvalidInput("adam_params must be an object")
        settings = {
            field.name: wire.number(parameters, field.name, 0.0)
            for field in dataclasses.fields(AdamSettings)
            if field.name in parameters
        }
        metrics = model.engine.optim_step(
            AdamSettings(**settings), _normalization(body), empty=model.queue.repeating
        )
        return {"metrics": metrics}

    return single_slice(step)


def save_weights(model: Model, store: CheckpointStore, account: str, body: Body) -> Work[Result]:
    def save() -> Result:
        ref = _new_ref(model, account, body)
        store.save(ref, model.spec, model.engine.state())
        return {"type": "save_weights", "path": str(ref)}

    return single_slice(save)


def load_weights(
    model: Model,
    store: CheckpointStore,
    account: str,
    body: Body,
    runs_of_job: Callable[[str], list[str]],
    *,
    keep_gradients: bool = False,
) -> Work[Result]:
    """runs_of_job: the runs of a trainer job, oldest first, for `cross_job://<job>/<name>`."""

    def load() -> Result:
        path = wire.text(body, "path")
        if path.startswith(CROSS_JOB):
            ref = _cross_job_checkpoint(path, account, store, runs_of_job)
        else:
            ref = CheckpointRef.parse(path, account=account, run=model.run)
        if ref in model.session.snapshots:
            raise CheckpointMismatch(
                f"{ref} is a sampler snapshot: it holds no optimizer state and can't be loaded as "
                "training state. Load what save_state returned"
            )
        if differences := model.spec.differences(store.info(ref).spec):
            raise CheckpointMismatch(
                f"checkpoint {ref} doesn't fit this model: {'; '.join(differences)}"
            )
        optimizer = wire.flag(body, "optimizer", False)
        model.engine.load(store.load(ref), optimizer=optimizer, keep_gradients=keep_gradients)
        return {"type": "load_weights", "path": str(ref)}

    return single_slice(load)


def sampler_weights(
    model: Model, account: str, body: Body, *, dedicated: bool = False
) -> Work[tuple[CheckpointRef, SamplerWeights]]:
    """Weights and reference of the new snapshot of a save_weights_for_sampler request."""

    def copy() -> tuple[CheckpointRef, SamplerWeights]:
        kind = body.get("checkpoint_type", "base")
        if kind not in SNAPSHOT_TYPES if dedicated else kind not in ("base", "delta"):
            raise UnsupportedOperation(
                f"checkpoint_type {kind!r} is not supported here; use base or delta, or, on a "
                "dedicated trainer job, merged_base"
            )
        if dedicated and kind == "delta" and (model.spec.rank or model.last_export is None):
            raise UnsupportedOperation(
                "a delta needs a full-parameter model that has exported a base: adapters are "
                "exported whole"
            )
        ref = _new_ref(model, account, body)
        if ref in model.session.snapshots:
            raise NameTaken(f"sampler snapshot {ref} exists; choose a new name")
        weights = model.engine.sampler_weights()
        return ref, _merged_base(model, weights) if kind == "merged_base" else weights

    return single_slice(copy)


def _merged_base(model: Model, weights: SamplerWeights) -> SamplerWeights:
    """The adapter merged into the base model, as full parameters."""
    ups = [tensor for name, tensor in weights.tensors.items() if ".lora_B." in name]
    if not any(bool(up.any()) for up in ups):
        raise InvalidInput("merged_base needs an adapter that differs from a new one")
    merged = model.engine.base.merged(weights)
    return SamplerWeights({name: tensor.detach() for name, tensor in merged.items()}, None)


def _cross_job_checkpoint(
    path: str, account: str, store: CheckpointStore, runs_of_job: Callable[[str], list[str]]
) -> CheckpointRef:
    """The newest checkpoint of a `cross_job://<job>/<name>`."""
    job, _, name = path.removeprefix(CROSS_JOB).partition("/")
    for run in reversed(runs_of_job(job)):
        ref = CheckpointRef.parse(name, account=account, run=run)
        if store.has(ref):
            return ref
    raise CheckpointNotFound(f"trainer job {job} has saved no checkpoint {name!r}")


def _rank_fits(rank: int, job_rank: int) -> bool:
    return 0 < rank <= job_rank if job_rank else rank == 0


def load_adapter(model: Model, models: ModelStore, body: Body) -> Work[Result]:
    """Load the weights of a promoted adapter and reset Adam."""

    def load() -> Result:
        path = wire.text(body, "adapter_path")
        if not model.spec.rank:
            raise UnsupportedOperation("an adapter is loaded into a LoRA model only")
        if differences := model.spec.differences(models.get(path).spec):
            raise CheckpointMismatch(
                f"adapter {path} doesn't fit this model: {'; '.join(differences)}"
            )
        state = TrainingState(models.weights(path), {}, {}, step=0)
        model.engine.load(state, optimizer=False)
        return {"type": "load_adapter", "model_id": model.model_id, "adapter_path": path}

    return single_slice(load)


def _pass(
    model: Model,
    payload: Any,
    run: Callable[[Submission], Generator[None, None, ForwardOutput]],
) -> Work[Result]:
    if not isinstance(payload, dict):
        raise InvalidInput("the input must be an object with data and loss_fn")
    base = model.engine.base
    submission = parse_submission(payload, vocabulary=base.vocabulary, positions=base.positions)
    outcome = yield from run(submission)
    return {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {"logprobs": {"data": row, "dtype": "float32", "shape": [len(row)]}}
            for row in outcome.logprobs
        ],
        "metrics": outcome.metrics,
    }


def _spec(body: Body) -> ModelSpec:
    base_model = wire.text(body, "base_model")
    if body.get("projection_head_dim"):
        raise UnsupportedOperation("the emulator does not support projection_head_dim")
    if wire.flag(body, "base_only", False):
        return ModelSpec(base_model=base_model, rank=0, frozen=True)
    lora = body.get("lora_config") or {"rank": 0}
    if lora.get("init_method") not in (None, "kaiming"):
        raise UnsupportedOperation(
            f"the emulator initializes adapters by 'kaiming' only, not {lora['init_method']!r}"
        )
    rank, alpha = wire.integer(lora, "rank"), lora.get("alpha")
    if rank < 0 or (alpha is not None and wire.integer(lora, "alpha") <= 0):
        raise InvalidInput("lora_config.rank must not be negative, and alpha must be above 0")
    seed = lora.get("seed")
    if seed is not None and not 0 <= wire.integer(lora, "seed") < 2**63:
        raise InvalidInput("lora_config.seed must be in [0, 2**63)")
    return ModelSpec(
        base_model=base_model,
        rank=rank,
        alpha=alpha,
        seed=seed,
        train_attn=wire.flag(lora, "train_attn", True),
        train_mlp=wire.flag(lora, "train_mlp", True),
        train_unembed=wire.flag(lora, "train_unembed", True),
    )


def _normalization(body: Body) -> Normalization:
    value = body.get("grad_accumulation_normalization") or "none"
    if value not in get_args(Normalization):
        raise InvalidInput(
            f"grad_accumulation_normalization must be one of {', '.join(get_args(Normalization))}, "
            f"not {value!r}"
        )
    return cast(Normalization, value)


def _new_ref(model: Model, account: str, body: Body) -> CheckpointRef:
    if model.spec.frozen:
        raise UnsupportedOperation("a frozen base model has nothing to save")
    name = wire.text(body, "path")
    if "/" in name:
        raise InvalidInput(f"{name!r}: a new checkpoint or snapshot takes a bare name")
    return CheckpointRef.parse(name, account=account, run=model.run)
