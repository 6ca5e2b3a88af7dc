"""The emulator: a local server that speaks the Fireworks wire protocol over a real small model.

The unmodified SDK connects with `FiretitanServiceClient(api_key="fw_local",
base_url="http://127.0.0.1:8780/training/v1/serverless")`.

| file | owns |
| --- | --- |
| http/ | the server, routes and JSON |
| service | the emulator behind the routes |
| sessions, managed | sessions; trainer jobs, deployments and hotload |
| compute | the torch thread, shared by training and sampling |
| training/ | operations and their order, one trainable model, losses, checkpoints |
| sampling/ | batched decoding |
| models/ | base models: recipes, cache, loading; promoted models |
| faults, errors, unknowns | injected faults, error responses, switches for unknown behavior |
"""
