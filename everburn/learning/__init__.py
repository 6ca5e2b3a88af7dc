"""From rollouts to what a trainer is sent: group completion, advantages, datums, schedules."""
