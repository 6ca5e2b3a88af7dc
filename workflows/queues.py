"""The task queues. A lease has one of its own besides (activities/trainer.py)."""

ORCHESTRATOR_QUEUE = "everburn-orchestrator"
ROLLOUT_QUEUE = "everburn-rollout"
TRAINER_QUEUE = "everburn-trainer"
