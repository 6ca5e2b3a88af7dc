"""The embedded Fireworks: a local server that speaks the service's wire protocol over a real model.

    from everburn.emulator.http.server import EmulatorSettings, serve
    serve(EmulatorSettings(home=Path("~/.everburn/emulator").expanduser()), port=8500)

and the unmodified SDK connects with `FiretitanServiceClient(api_key="fw_local",
base_url="http://127.0.0.1:8500/training/v1/serverless")`.

| file | owns |
| --- | --- |
| server, service | the HTTP application, and the emulator behind it |
| training, completions, admin, wire | the routes of training, of inference, of fault injection |
| control_plane, models | accounts, snapshots that are promoted, and the models they become |
| dedicated, managed | trainer jobs, deployments, hotload: their routes, and what they are |
| sessions | sessions, their models and snapshots, and how long they live |
| futures | submitted operations: order, de-duplication, results |
| operations | one training request: from its JSON to its result |
| compute | the one thread that touches torch, shared fairly by training and sampling |
| engine, parameters, spec | one trainable model: adapter, gradients, Adam |
| losses, loss_settings, datums | the objectives, and the data they are computed on |
| sampler, decoder, distribution, stops | batched decoding: rows, arithmetic, draws, ends |
| bases, base_model | frozen base models in memory, and where on the machine they lie |
| recipe, vocabulary, arithmetic, sums | how base models are made; the main job's |
| checkpoints | resumable state on disk |
| faults, errors | what goes wrong on purpose, and what goes wrong by mistake |
| unknowns | what the live service may do, in its worst form |
"""
