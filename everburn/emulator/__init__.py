"""The embedded Fireworks: a local server that speaks the service's wire protocol over a real model.

    from everburn.emulator.http.server import EmulatorSettings, serve
    serve(EmulatorSettings(home=Path("~/.everburn/emulator").expanduser()), port=8500)

and the unmodified SDK connects with `FiretitanServiceClient(api_key="fw_local",
base_url="http://127.0.0.1:8500/training/v1/serverless")`.

| file | owns |
| --- | --- |
| http/server, wire | the HTTP application; the form of requests and answers |
| http/training_routes, completions, control_plane, managed_routes, admin | the routes |
| service, sessions, managed | the emulator behind them: sessions, trainer jobs, deployments |
| compute | the one thread that touches torch, shared fairly by training and sampling |
| training/futures, operations | submitted operations: order, results; one request of them |
| training/engine, parameters, spec, checkpoints | one trainable model, and its state on disk |
| training/losses, loss_settings, datums | the objectives, and the data they are computed on |
| sampling/ | batched decoding: rows, arithmetic, draws, ends |
| models/bases, base_model, registry | base models in memory and on disk; promoted models |
| models/recipe, vocabulary | how base models are made |
| faults, errors | what goes wrong on purpose, and what goes wrong by mistake |
| unknowns | what the live service may do, in its worst form |
"""
