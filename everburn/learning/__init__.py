"""From rollouts to what a trainer is sent, and what its answers say: group completion, advantages
(IGPO's, too), losses by name, datums, submissions, schedules, diagnostics."""
