"""What the tests share: a farm of real workers, and scripts that decide what happens in a run."""
