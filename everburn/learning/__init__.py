"""From rollouts to trainer requests: groups, advantages, IGPO, losses, datums, submissions,
schedules, diagnostics."""
